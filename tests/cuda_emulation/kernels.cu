// Kernels that the tests of the emulator run: the usual CUDA patterns, each right, and wrong in one way after another.
#include <cstdio>
#include <vector>

#include "flowtt/tensor_cores.cuh"

namespace {

enum Defect : int {
  kNone = 0,
  kMissingBarrier,
  kDivergentBarrier,
  kBarrierAfterExit,
  kExitWhileOthersWait,
  kMissingWarpSync,
  kShuffleOutsideMask,
  kMaskOfExitedLane,
  kDivergentWarpOperations,
  kUninitialisedShared,
  kSharedOverflow,
  kGlobalOverflow,
  kUnregisteredMemory,
  kUninitialisedGlobal,
  kMisaligned,
  kMisalignedAtomic,
  kPlainAdd,
  kPlainSharedAdd,
  kMissingWait,
  kUnwaitedCopy,
  kMissingFence,
  kMissingAcquire,
  kMissingBarrierBeforeFence,
  kWriteAfterFence,
  kWaitsForLaterBlock,
  kDeadlock,
};

struct Arguments {
  int defect;
  const float* in;  // 1024, in[i] = i
  float* out;       // 1024
  float* scratch;   // 1024, not initialised
  unsigned* words;  // 64 zeros
};

// Reverses 256 numbers through shared memory.
__global__ void reverse(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  float* const tile = flowtt::shared_array<float>(raw, 0, 256);
  const int i = threadIdx.x;
  if (a.defect == kBarrierAfterExit && i == 7) return;
  if (!(a.defect == kUninitialisedShared && i == 9)) tile[i + (a.defect == kSharedOverflow && i == 255)] = a.in[i];
  if (a.defect == kDivergentBarrier && i < 128) {
    __syncthreads();
  } else if (a.defect == kExitWhileOthersWait && i == 255) {
    return;
  } else if (a.defect != kMissingBarrier) {
    __syncthreads();
  }
  a.out[i] = tile[255 - i];
}

// Sum of 1024 numbers: warps, then a block, then all blocks.
__global__ void reduce(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  float* const warp_sums = flowtt::shared_array<float>(raw, 0, 33);
  const int lane = threadIdx.x % 32;
  float sum = a.in[blockIdx.x * blockDim.x + threadIdx.x];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x == 0) warp_sums[32] = 0.f;
  __syncthreads();
  if (lane == 0) {
    if (a.defect == kPlainSharedAdd) {
      warp_sums[32] += sum;
    } else {
      atomicAdd(warp_sums + 32, sum);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (a.defect == kPlainAdd) {
      a.out[0] += warp_sums[32];
    } else {
      atomicAdd(a.out, warp_sums[32]);
    }
  }
  if (threadIdx.x == 1 && a.defect == kMisalignedAtomic) atomicAdd(reinterpret_cast<double*>(a.out + 1), 1.0);
}

// Each warp rotates 32 numbers through shared memory of its own.
__global__ void rotate(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  float* const tile = flowtt::shared_array<float>(raw, 0, 256);
  const int i = threadIdx.x, lane = i % 32, first = i - lane;
  tile[i] = a.in[i];
  if (a.defect == kMaskOfExitedLane && lane == 3) return;
  if (a.defect != kMissingWarpSync) __syncwarp();
  const float got = tile[first + (lane + 1) % 32];
  float value = got;
  if (a.defect == kShuffleOutsideMask) {
    if (lane < 24) value = __shfl_sync(0x00ffffffu, got, 30);
  } else if (a.defect == kDivergentWarpOperations) {
    if (lane < 16) {
      value = __shfl_sync(0xffffffffu, got, lane);
    } else {
      value = __shfl_sync(0xffffffffu, got, lane ^ 1);
    }
  }
  a.out[i] = value;
}

// Accesses that are wrong by themselves.
__global__ void touch(Arguments a) {
  static const float kOutside[4] = {};
  const int i = threadIdx.x;
  float value = a.in[i];
  if (a.defect == kGlobalOverflow && i == 5) value = a.in[1024];
  if (a.defect == kUnregisteredMemory && i == 5) value = *reinterpret_cast<const float*>(a.words + 1000000);
  if (a.defect == kUninitialisedGlobal && i == 5) value = a.scratch[i];
  if (a.defect == kMisaligned && i == 5) value = flowtt::load4(a.in + 1).x;
  a.scratch[i] = value + kOutside[i % 4];
  __syncthreads();
  a.out[i] = a.scratch[i ^ 1];
}

// A ring of three tiles filled by asynchronous copies.
__global__ void ring(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  float* const tiles = flowtt::shared_array<float>(raw, 0, 3 * 128);
  const int i = threadIdx.x;
  const auto load = [&](int tile) {
    if (tile < 8 && i < 32) {
      __pipeline_memcpy_async(tiles + tile % 3 * 128 + 4 * i, a.in + tile * 128 + 4 * i, 16);
    }
    __pipeline_commit();
  };
  load(0);
  load(1);
  for (int tile = 0; tile < 8; ++tile) {
    if (a.defect != kMissingWait) __pipeline_wait_prior(1);
    __syncthreads();
    load(tile + 2);
    a.out[tile * 128 + i] = tiles[tile % 3 * 128 + 127 - i];
  }
  if (a.defect == kUnwaitedCopy) load(0);
  if (a.defect != kUnwaitedCopy) __pipeline_wait_prior(0);
}

// Blocks publish 32 numbers each; the last one to finish adds them up. words[0] counts.
__global__ void last_block(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  int* const is_last = flowtt::shared_array<int>(raw, 0, 1);
  const int i = threadIdx.x;
  if (i < 32) a.scratch[blockIdx.x * 32 + i] = 1.f;
  if (a.defect != kMissingBarrierBeforeFence) __syncthreads();
  if (i == 32) {  // of another warp than the writers
    if (a.defect != kMissingFence) __threadfence();
    if (a.defect == kWriteAfterFence) a.scratch[blockIdx.x * 32 + 31] = 1.f;
    *is_last = atomicAdd(a.words, 1u) == gridDim.x - 1;
    if (a.defect != kMissingAcquire) __threadfence();
  }
  __syncthreads();
  if (*is_last == 0) return;  // uniform
  float sum = 0.f;
  if (i < int(gridDim.x)) {
    for (int k = 0; k < 32; ++k) sum += a.scratch[i * 32 + k];
    a.out[i] = sum;
  }
}

// Blocks wait in turn: block b for word b - 1. In order of a ticket, so that every block waits for an earlier one.
__global__ void chain(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  int* const turn = flowtt::shared_array<int>(raw, 0, 1);
  if (threadIdx.x == 0) {
    *turn = a.defect == kWaitsForLaterBlock ? int(gridDim.x - 1 - atomicAdd(a.words + 63, 1u))
                                            : int(atomicAdd(a.words + 63, 1u));
    while (*turn > 0 && *static_cast<volatile unsigned*>(a.words + *turn - 1) == 0) __nanosleep(20);
    __threadfence();
    a.out[*turn] = *turn == 0 ? 1.f : a.out[*turn - 1] + 1.f;
    __threadfence();
    atomicExch(a.words + *turn, 1u);
  }
  if (a.defect == kDeadlock) {  // half the warp waits for the other half, which waits for it
    __syncwarp(threadIdx.x < 16 ? 0x0001ffffu : 0xffff8000u);
  }
}

// Two blocks write 16-bit numbers in turn, each only its own.
__global__ void halves(Arguments a) {
  const int i = 2 * threadIdx.x + blockIdx.x;
  auto* const number = reinterpret_cast<uint16_t*>(a.scratch) + i;
  *number = static_cast<uint16_t>(i);
  __syncthreads();
  *number = static_cast<uint16_t>(*number + 1);
  a.out[i] = *number;
}

// A [16, 16] times B [16, 8] by a warp, in BF16, FP16 and TF32; whole numbers, so that all are exact.
template <class Element>
__device__ void multiply_16_bit(float* out, Element* b) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const auto left = [](int m, int k) { return float((16 * m + k) % 7); };
  for (int i = lane; i < 128; i += 32) b[i].bits = uint16_t(flowtt::pack(b, float(i % 5), 0.f));
  __syncwarp();
  const auto pair = [&](int m, int k) { return flowtt::pack(b, left(m, k), left(m, k + 1)); };
  const uint32_t operand[4] = {pair(g, 2 * t), pair(g + 8, 2 * t), pair(g, 2 * t + 8), pair(g + 8, 2 * t + 8)};
  uint32_t columns[2];
  flowtt::load_columns(columns, b + lane % 16 * 8);
  float sum[4] = {}, other[2][1][4] = {};
  flowtt::multiply_16<Element>(sum, operand, columns);
  const auto from_left = [&](int half, int k) { return left(g + 8 * half, k); };
  const auto from_right = [&](int, int k) { return flowtt::widen(b[8 * k + g]); };
  flowtt::multiply_add<flowtt::Depth::kAlongRows, false, false>(other[0], 16, from_left, from_right);
  flowtt::multiply_add<flowtt::Depth::kOverRows, true, true>(other[1], 16, from_left, from_right);
  const float (*const all[3])[4] = {&sum, other[0], other[1]};
  for (int i = 0; i < 3; ++i) {
    const flowtt::Quad quad = flowtt::quad_of(*all[i]);
    flowtt::store4(out + 128 * i + 8 * quad.row + quad.column, quad.value);
  }
  __syncwarp();
}

__global__ void multiply(Arguments a) {
  FLOWTT_DYNAMIC_SHARED(raw);
  multiply_16_bit(a.out, flowtt::shared_array<flowtt::Bfloat16>(raw, 0, 128));
  multiply_16_bit(a.out + 384, flowtt::shared_array<flowtt::Float16>(raw, 0, 128));
}

std::string error;

void run(const std::string& kernel, const Arguments& a) {
  if (kernel == "reverse") {
    FLOWTT_LAUNCH(reverse, 1, 256, 256 * 4 + 64, nullptr, a);
  } else if (kernel == "reduce") {
    FLOWTT_LAUNCH(reduce, 4, 256, 33 * 4 + 64, nullptr, a);
  } else if (kernel == "rotate") {
    FLOWTT_LAUNCH(rotate, 1, 256, 256 * 4 + 64, nullptr, a);
  } else if (kernel == "touch") {
    FLOWTT_LAUNCH(touch, 1, 256, 0, nullptr, a);
  } else if (kernel == "ring") {
    FLOWTT_LAUNCH(ring, 1, 128, 3 * 128 * 4 + 64, nullptr, a);
  } else if (kernel == "last_block") {
    FLOWTT_LAUNCH(last_block, 16, 64, 4 + 64, nullptr, a);
  } else if (kernel == "halves") {
    FLOWTT_LAUNCH(halves, 2, 64, 0, nullptr, a);
  } else if (kernel == "multiply") {
    FLOWTT_LAUNCH(multiply, 1, 32, 256 + 64, nullptr, a);
  } else {
    FLOWTT_LAUNCH(chain, 32, 32, 4 + 64, nullptr, a);
  }
}

}  // namespace

// Runs a kernel; out holds 1024 numbers. Returns the error, or "".
extern "C" __attribute__((visibility("default"))) const char* run_kernel(const char* kernel, int defect, float* out) {
  error.clear();
  std::vector<float> in(1024);
  for (int i = 0; i < 1024; ++i) in[i] = float(i);
  Arguments a{defect, nullptr, nullptr, nullptr, nullptr};
  void *d_in, *d_out, *d_scratch, *d_words;
  cudaMalloc(&d_in, 4096);
  cudaMalloc(&d_out, 4096);
  cudaMalloc(&d_scratch, 4096);
  cudaMalloc(&d_words, 256);
  cudaMemcpy(d_in, in.data(), 4096, cudaMemcpyHostToDevice);
  cudaMemsetAsync(d_out, 0, 4096, nullptr);
  cudaMemsetAsync(d_words, 0, 256, nullptr);
  a.in = static_cast<float*>(d_in);
  a.out = static_cast<float*>(d_out);
  a.scratch = static_cast<float*>(d_scratch);
  a.words = static_cast<unsigned*>(d_words);
  try {
    run(kernel, a);
    cudaMemcpy(out, d_out, 4096, cudaMemcpyDeviceToHost);
  } catch (const cuda_emulation::Error& e) {
    error = e.what();
  }
  for (void* data : {d_in, d_out, d_scratch, d_words}) cudaFree(data);
  return error.c_str();
}
