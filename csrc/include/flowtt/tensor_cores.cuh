// Products of small matrices by a whole warp on the tensor cores, and what they are made of.
//
// Lane 4 g + t holds of D [16, 8]: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1).
#pragma once

#include "flowtt/element.cuh"

namespace flowtt {

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

// D [16, 8] += A [16, 8] * B [8, 8] in TF32. Lane 4 g + t holds
//   A: (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4)   B: (t, g) (t + 4, g)
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
#ifdef FLOWTT_CUDA_EMULATION
  struct Operands {
    float a[4], b[2];
  } all[32];
  ::cuda_emulation::gather({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, all);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (lane == 0) FLOWTT_COUNT_OFTEN("TF32 multiply-adds", 1024);
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

// Two floats as 16-bit numbers, the first in the lower half.
FLOWTT_INLINE uint32_t pack(Bfloat16*, float low, float high) {
#ifdef FLOWTT_CUDA_EMULATION
  return bfloat16_to_nearest(low) | static_cast<uint32_t>(bfloat16_to_nearest(high)) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
FLOWTT_INLINE uint32_t pack(Float16*, float low, float high) {
#ifdef FLOWTT_CUDA_EMULATION
  return float16_to_nearest(low) | static_cast<uint32_t>(float16_to_nearest(high)) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// Rows k of 8 elements in shared memory as the operand B of multiply_16: lane k < 16 passes where row k starts, a
// multiple of 16 bytes; the others anything of the kind.
template <class Element>
__device__ __forceinline__ void load_columns(uint32_t (&b)[2], const Element* row) {
#ifdef FLOWTT_CUDA_EMULATION
  struct Row {
    uint32_t pairs[4];
  } all[32];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  ::cuda_emulation::gather(lane < 16 ? *reinterpret_cast<const Row*>(row) : Row{}, all);
  const auto at = [&](int k) { return all[k].pairs[g / 2] >> g % 2 * 16 & 0xffffu; };
  for (int half = 0; half < 2; ++half) b[half] = at(8 * half + 2 * t) | at(8 * half + 2 * t + 1) << 16;
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#endif
}

// D [16, 8] += A [16, 16] * B [16, 8] of 16-bit numbers, summed up in float32. Lane 4 g + t holds in pairs along k
//   A: (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8)   B: (2t, g) (2t + 8, g)
template <class Element>
__device__ __forceinline__ void multiply_16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef FLOWTT_CUDA_EMULATION
  struct Operands {
    uint32_t a[4], b[2];
  } all[32];
  ::cuda_emulation::gather({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, all);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (lane == 0) FLOWTT_COUNT_OFTEN("16-bit multiply-adds", 2048);
  const auto half = [](uint32_t pair, int k) { return widen(Element{static_cast<uint16_t>(pair >> k % 2 * 16)}); };
  for (int k = 0; k < 16; ++k) {
    const int q = k % 8 / 2, upper = k / 8;
    const uint32_t* const row = all[4 * g + q].a + 2 * upper;
    const float first = half(all[8 * t + q].b[upper], k), second = half(all[8 * t + 4 + q].b[upper], k);
    d[0] += half(row[0], k) * first;
    d[1] += half(row[0], k) * second;
    d[2] += half(row[1], k) * first;
    d[3] += half(row[1], k) * second;
  }
#else
#define FLOWTT_MMA(type)                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type         \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same<Element, Bfloat16>::value) {
    FLOWTT_MMA("bf16");
  } else {
    FLOWTT_MMA("f16");
  }
#undef FLOWTT_MMA
#endif
}

// An operand of multiply_tf32: as it is, or as the sum of two TF32 numbers.
template <bool SPLIT, int N>
struct Tf32Operand {
  float high[N], low[SPLIT ? N : 1];

  FLOWTT_INLINE void set(int i, float x) {
    high[i] = to_tf32(x);
    if (SPLIT) low[SPLIT ? i : 0] = to_tf32(x - high[i]);
  }
};

// Which two k of eight a lane takes does not matter as long as A and B agree: apart where k runs along a row in memory,
// neighbours where it runs over rows, so that lanes are in different banks.
enum class Depth { kAlongRows, kOverRows };

// sum [16, 8 TILES] += A * B, `depth` of both a multiple of eight. a(half, k) is A's element in row g + 8 half and
// column k, b(n, k) B's in row k and column g of tile n. Operands that are not exact in TF32 are split for the accuracy
// of FP32: of the four partial products the smallest is dropped.
template <Depth D, bool SPLIT_A, bool SPLIT_B, int TILES, class A, class B>
__device__ __forceinline__ void multiply_add(float (&sum)[TILES][4], int depth, const A& a, const B& b) {
  constexpr int kFirst = D == Depth::kAlongRows ? 1 : 2, kSecond = D == Depth::kAlongRows ? 4 : 1;
  const int t = threadIdx.x % 4;
#pragma unroll 1
  for (int k = kFirst * t; k < depth; k += 8) {
    Tf32Operand<SPLIT_A, 4> left;
    left.set(0, a(0, k));
    left.set(1, a(1, k));
    left.set(2, a(0, k + kSecond));
    left.set(3, a(1, k + kSecond));
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      Tf32Operand<SPLIT_B, 2> right;
      right.set(0, b(n, k));
      right.set(1, b(n, k + kSecond));
      if constexpr (SPLIT_A) multiply_tf32(sum[n], left.low, right.high);
      if constexpr (SPLIT_B) multiply_tf32(sum[n], left.high, right.low);
      multiply_tf32(sum[n], left.high, right.high);
    }
  }
}

// Four neighbours in a row of a tile [16, 8]; every lane has other ones.
struct Quad {
  int row, column;
  float4 value;
};

// From what lanes hold of D: pairs of lanes swap halves.
__device__ __forceinline__ Quad quad_of(const float (&d)[4]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const bool lower = t % 2 != 0;
  const float x = __shfl_xor_sync(0xffffffffu, lower ? d[0] : d[2], 1);
  const float y = __shfl_xor_sync(0xffffffffu, lower ? d[1] : d[3], 1);
  // [mutant: swapped-rows]
  return {lane / 4 + (lower ? 8 : 0), t / 2 * 4, lower ? make_float4(x, y, d[2], d[3]) : make_float4(d[0], d[1], x, y)};
}

// Calls body with two integral constants, whether to split each operand: not where TF32 is precise enough for the user.
template <bool SPLIT_A, bool SPLIT_B, class Body>
__device__ __forceinline__ void with_splits(bool tf32, const Body& body) {
  if ((SPLIT_A || SPLIT_B) && !tf32) {  // [mutant: unsplit-operands]
    body(std::integral_constant<bool, SPLIT_A>{}, std::integral_constant<bool, SPLIT_B>{});
  } else {
    body(std::false_type{}, std::false_type{});
  }
}

}  // namespace flowtt
