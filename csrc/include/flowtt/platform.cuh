// Whether nvcc compiles the kernels, or the emulator that runs them on a CPU in tests: known here and, for single
// instructions, in element.cuh and tensor_cores.cuh.
//
// What follows for kernels: shared memory only through FLOWTT_DYNAMIC_SHARED and SharedPlan; launches only through
// FLOWTT_LAUNCH; inline PTX only in these three headers; full masks in warp operations. A header with kernels is for
// one source file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef FLOWTT_CUDA_EMULATION
#include "cuda_emulation.h"
#define FLOWTT_INLINE __attribute__((always_inline)) inline  // reports then name the caller's line
#define FLOWTT_DYNAMIC_SHARED(name) unsigned char* const name = ::cuda_emulation::dynamic_shared()
#define FLOWTT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream),                                         \
   ::cuda_emulation::launch(kernel, dim3(grid), dim3(block), shared_bytes, __FILE__, __LINE__, __VA_ARGS__))
#define FLOWTT_COUNT(name, amount) ::cuda_emulation::count(name, amount)
#ifdef FLOWTT_CUDA_CHECKED
#define FLOWTT_COUNT_OFTEN(name, amount) FLOWTT_COUNT(name, amount)  // slow: only in the checked build
#endif
#else
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <utility>
#define FLOWTT_INLINE __device__ __forceinline__
#define FLOWTT_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define FLOWTT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::flowtt::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define FLOWTT_COUNT(name, amount) static_cast<void>(0)  // work that the emulator counts
#endif
#ifndef FLOWTT_COUNT_OFTEN
#define FLOWTT_COUNT_OFTEN(name, amount) static_cast<void>(0)
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

FLOWTT_INLINE void fma4(float (&sum)[4], float a, float4 b) {
  FLOWTT_COUNT_OFTEN("multiply-adds", 4);
  sum[0] += a * b.x;
  sum[1] += a * b.y;
  sum[2] += a * b.z;
  sum[3] += a * b.w;
}
FLOWTT_INLINE void fma4(float4& sum, float a, float4 b) {
  FLOWTT_COUNT_OFTEN("multiply-adds", 4);
  sum.x += a * b.x;
  sum.y += a * b.y;
  sum.z += a * b.z;
  sum.w += a * b.w;
}

// Four fused multiply-adds; one sum of products would be a multiplication, three of them and an addition.
FLOWTT_INLINE void dot4(float& sum, float4 a, float4 b) {
  FLOWTT_COUNT_OFTEN("multiply-adds", 4);
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

}  // namespace flowtt
