// The only header that knows whether nvcc compiles the kernels, or the emulator that runs them on a CPU in tests.
//
// What follows for kernels: shared memory only through FLOWTT_DYNAMIC_SHARED and SharedPlan; launches only through
// FLOWTT_LAUNCH; inline PTX only here; full masks in warp operations. A header with kernels is for one source file.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef FLOWTT_CUDA_EMULATION
#include "cuda_emulation.h"
#define FLOWTT_INLINE __attribute__((always_inline)) inline  // reports then name the caller's line
#define FLOWTT_DYNAMIC_SHARED(name) unsigned char* const name = ::cuda_emulation::dynamic_shared()
#define FLOWTT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream),                                         \
   ::cuda_emulation::launch(kernel, dim3(grid), dim3(block), shared_bytes, __FILE__, __LINE__, __VA_ARGS__))
#define FLOWTT_KERNEL_FAILURE(...)                               \
  do {                                                           \
    char text_[512];                                             \
    snprintf(text_, sizeof text_, __VA_ARGS__);                  \
    ::cuda_emulation::kernel_failure(text_, __FILE__, __LINE__); \
  } while (false)
#define FLOWTT_COUNT(name, amount) ::cuda_emulation::count(name, amount)
#else
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <utility>
#define FLOWTT_INLINE __device__ __forceinline__
#define FLOWTT_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define FLOWTT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::flowtt::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define FLOWTT_KERNEL_FAILURE(...) \
  do {                             \
    printf(__VA_ARGS__);           \
    __trap();                      \
  } while (false)
#define FLOWTT_COUNT(name, amount) static_cast<void>(0)  // work that the emulator counts
#endif

namespace flowtt {

#ifdef FLOWTT_CUDA_EMULATION
constexpr size_t kRedZone = 64;  // bytes between arrays in shared memory
FLOWTT_INLINE void forbid(void* begin) { ::cuda_emulation::shared_red_zone(begin, kRedZone); }
#else
constexpr size_t kRedZone = 0;
__device__ __forceinline__ void forbid(void*) {}

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   A&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...);
}
#endif

// Lays out shared memory: the host takes `bytes`, the kernel pointers at the offsets that `take` returned.
class SharedPlan {
 public:
  template <class T>
  constexpr int take(size_t count) {
    const size_t offset = (bytes_ + 15) / 16 * 16;
    bytes_ = offset + count * sizeof(T) + kRedZone;
    return static_cast<int>(offset);
  }
  constexpr size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// The array of `count` at an offset of a SharedPlan.
template <class T>
__device__ __forceinline__ T* shared_array(unsigned char* shared, int offset, size_t count) {
  T* const data = reinterpret_cast<T*>(shared + offset);
  if (kRedZone > 0) forbid(data + count);
  return data;
}

FLOWTT_INLINE float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
FLOWTT_INLINE void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

FLOWTT_INLINE void fma4(float4& sum, float a, float4 b) {
  sum.x += a * b.x;
  sum.y += a * b.y;
  sum.z += a * b.z;
  sum.w += a * b.w;
}

// Four fused multiply-adds; one sum of products would be a multiplication, three of them and an addition.
FLOWTT_INLINE void dot4(float& sum, float4 a, float4 b) {
  sum += a.x * b.x;
  sum += a.y * b.y;
  sum += a.z * b.z;
  sum += a.w * b.w;
}

// One 16-byte reduction where the hardware has it, from sm_90 on.
FLOWTT_INLINE void reduce4(float* p, float4 v) {
#if defined(FLOWTT_CUDA_EMULATION) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
  atomicAdd(reinterpret_cast<float4*>(p), v);
#else
  atomicAdd(p, v.x);
  atomicAdd(p + 1, v.y);
  atomicAdd(p + 2, v.z);
  atomicAdd(p + 3, v.w);
#endif
}

// A float as a TF32 number: 10 bits of mantissa, to the nearest, ties away from zero.
__device__ __forceinline__ float to_tf32(float x) {
#ifdef FLOWTT_CUDA_EMULATION
  return __int_as_float((__float_as_int(x) + 0x1000) & static_cast<int>(0xffffe000u));
#else
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
#endif
}

// D [16, 8] += A [16, 8] * B [8, 8] by the tensor cores, for a whole warp. Lane 4 g + t holds
//   A: (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4)   B: (t, g) (t + 4, g)   D: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8,
//   2t + 1)
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
#ifdef FLOWTT_CUDA_EMULATION
  struct Operands {
    float a[4], b[2];
  } all[32];
  ::cuda_emulation::gather({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, all);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 8; ++k) {
    const int q = k % 4, half = k / 4;
    const float* const row = all[4 * g + q].a + 2 * half;
    const float first = all[8 * t + q].b[half], second = all[8 * t + 4 + q].b[half];
    d[0] += row[0] * first;
    d[1] += row[0] * second;
    d[2] += row[1] * first;
    d[3] += row[1] * second;
  }
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#endif
}

}  // namespace flowtt
