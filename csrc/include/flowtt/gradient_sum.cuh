// Where core gradients are added up by many blocks at once.
//
// FloatSum is the fast way; the order of its additions, hence the last bits, varies. FixedSum adds 64-bit integers, in
// units so small that the largest possible sum just fits: integer addition gives the same bits in any order.
#pragma once

#include "flowtt/device_table.h"
#include "flowtt/platform.cuh"

namespace flowtt {

struct FloatSum {
  static constexpr bool kDeterministic = false;
  float* data;

  // [mutant: plain-addition]
  __device__ __forceinline__ void add(int64_t i, float value) const { atomicAdd(data + i, value); }
  // Four neighbours; i is a multiple of four.
  __device__ __forceinline__ void add4(int64_t i, float4 value) const { reduce4(data + i, value); }
  __device__ __forceinline__ float get(int64_t i) const { return data[i]; }
};

struct FixedSum {
  static constexpr bool kDeterministic = true;
  unsigned long long* data;
  const float* scale;  // [0]: units a one, a power of two or NaN; [1]: its inverse

  __device__ __forceinline__ void add(int64_t i, float value) const {
    atomicAdd(data + i, static_cast<unsigned long long>(__float2ll_rn(value * scale[0])));
  }
  __device__ __forceinline__ void add4(int64_t i, float4 value) const {
    add(i, value.x);
    add(i + 1, value.y);
    add(i + 2, value.z);
    add(i + 3, value.w);
  }
  __device__ __forceinline__ float get(int64_t i) const {
    return __ll2float_rn(static_cast<long long>(data[i])) * scale[1];
  }
};

}  // namespace flowtt
