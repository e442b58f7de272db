// Compiles CUDA C++ kernels as host C++ and runs every CUDA thread as a fiber on one OS thread, in a random order that
// a seed decides. For tests only.
//
// CUDA's own headers provide types and the declarations of the runtime API; here is only what nvcc itself would
// provide. Errors are exceptions of type Error, with file and line. In the checked build (see build.py) every memory
// access of a kernel is also checked: races, uninitialised and out-of-bounds reads and writes, misalignment.
#pragma once
#ifdef __CUDACC__
#error "cuda_emulation.h is for host compilers"
#endif
#undef __global__
#undef __shared__
#define __global__
#define __shared__ use_FLOWTT_DYNAMIC_SHARED  // would be a variable of one thread's stack here
#include <cuda_runtime.h>
#undef __launch_bounds__
#undef __grid_constant__
#undef __device__
#undef __host__
#undef __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __device__
#define __host__
#define __forceinline__ __attribute__((always_inline)) inline

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

// Trailing parameters that name the caller's line.
#define CUDA_EMULATION_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define CUDA_EMULATION_INLINE __attribute__((always_inline)) inline  // keeps the caller's line in reports

namespace cuda_emulation {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Config {
  uint64_t seed = 1;                  // of block order, thread order, preemption
  int resident_blocks = 0;            // blocks alive at once; 0: 1 to 4, at random
  int multiprocessors = 3;            // what cudaDeviceGetAttribute says
  int blocks_per_multiprocessor = 2;  // what the occupancy calculator says
  int shared_bytes = 227 * 1024;      // the most a block may ask for
  int sync_preemption_percent = 25;   // after an atomic or a fence
  int accesses_per_preemption = 997;  // about; checked build
  uint64_t max_steps = 50'000'000;    // switches without a thread finishing: livelock
  bool profile = false;               // count memory transactions; checked build
};
Config& config();
// Sets the seed and restarts the random sequence.
void seed(uint64_t value);

// Memory that kernels may access; any other global access is an error in the checked build.
void register_buffer(const void* data, size_t bytes, const char* name, bool initialised);
void unregister_buffer(const void* data);
// Marks memory as initialised, as a copy or memset of the host does.
void host_wrote(const void* data, size_t bytes);

// Whether a bug that mutants.py has planted is awake.
bool has_bug(int number);

struct Thread {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Thread* current;

enum class Vote { kNone, kCount, kAnd, kOr };
enum class WarpOp { kShuffle, kBallot, kMatch, kGather, kSync };

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* arguments, size_t arguments_size,
         const char* file, int line);
int block_barrier(Vote vote, int predicate, const char* file, int line);
void warp_operation(WarpOp op, unsigned mask, const void* in, void* out, unsigned size, int source_lane,
                    const char* file, int line);
int lane();
void atomic_begin(void* address, void* old, unsigned size, const char* file, int line);
void atomic_end(void* address, const void* value, unsigned size);
void device_fence();
void yield();
void async_copy(void* target, const void* source, unsigned size, unsigned zeros, const char* file, int line);
void async_commit();
void async_wait(unsigned groups_in_flight);
unsigned char* dynamic_shared();
void shared_red_zone(void* begin, size_t bytes);
// Adds to the counter of that name.
void count(const char* name, uint64_t amount);

template <class T, class F>
CUDA_EMULATION_INLINE T atomic_update(T* address, F change, const char* file, int line) {
  T old;
  atomic_begin(address, &old, sizeof(T), file, line);
  const T changed = change(old);
  atomic_end(address, &changed, sizeof(T));
  return old;
}

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, const char* file, int line,
                   A&&... arguments) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> arguments;
  } call{kernel, {std::forward<A>(arguments)...}};
  run(
      grid, block, shared_bytes,
      [](void* data) {
        auto* call = static_cast<Call*>(data);
        std::apply(call->kernel, call->arguments);
      },
      &call, sizeof call, file, line);
  return cudaSuccess;
}

template <class T>
T shuffle(unsigned mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable<T>::value, "type of a shuffle");
  T result;
  warp_operation(WarpOp::kShuffle, mask, &value, &result, sizeof(T), source, file, line);
  return result;
}

// What all lanes of a full warp pass, for emulated instructions that work on a warp: all[lane].
template <class T>
void gather(const T& value, T (&all)[32], CUDA_EMULATION_CALLER) {
  static_assert(sizeof(T) <= 32 && std::is_trivially_copyable<T>::value, "type of a gather");
  warp_operation(WarpOp::kGather, 0xffffffffu, &value, all, sizeof(T), 0, file, line);
}

}  // namespace cuda_emulation

#define threadIdx (::cuda_emulation::current->thread)
#define blockIdx (::cuda_emulation::current->block)
#define blockDim (::cuda_emulation::current->block_size)
#define gridDim (::cuda_emulation::current->grid_size)

// Synchronisation.
inline void __syncthreads(CUDA_EMULATION_CALLER) {
  cuda_emulation::block_barrier(cuda_emulation::Vote::kNone, 0, file, line);
}
inline int __syncthreads_count(int predicate, CUDA_EMULATION_CALLER) {
  return cuda_emulation::block_barrier(cuda_emulation::Vote::kCount, predicate, file, line);
}
inline int __syncthreads_and(int predicate, CUDA_EMULATION_CALLER) {
  return cuda_emulation::block_barrier(cuda_emulation::Vote::kAnd, predicate, file, line);
}
inline int __syncthreads_or(int predicate, CUDA_EMULATION_CALLER) {
  return cuda_emulation::block_barrier(cuda_emulation::Vote::kOr, predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_EMULATION_CALLER) {
  cuda_emulation::warp_operation(cuda_emulation::WarpOp::kSync, mask, nullptr, nullptr, 0, 0, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_EMULATION_CALLER) {
  const unsigned vote = predicate != 0;
  unsigned result;
  cuda_emulation::warp_operation(cuda_emulation::WarpOp::kBallot, mask, &vote, &result, 4, 0, file, line);
  return result;
}
inline int __any_sync(unsigned mask, int predicate, CUDA_EMULATION_CALLER) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_EMULATION_CALLER) {
  return __ballot_sync(mask, predicate, file, line) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CUDA_EMULATION_CALLER) {
  unsigned long long wide = 0;
  std::memcpy(&wide, &value, sizeof value);
  unsigned result;
  cuda_emulation::warp_operation(cuda_emulation::WarpOp::kMatch, mask, &wide, &result, 8, 0, file, line);
  return result;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_EMULATION_CALLER) {
  const int first = cuda_emulation::lane() & ~(width - 1);
  return cuda_emulation::shuffle(mask, value, first | (source & (width - 1)), file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_EMULATION_CALLER) {
  const int lane = cuda_emulation::lane(), source = lane - int(delta);
  return cuda_emulation::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_EMULATION_CALLER) {
  const int lane = cuda_emulation::lane(), source = lane + int(delta);
  return cuda_emulation::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUDA_EMULATION_CALLER) {
  const int lane = cuda_emulation::lane(), source = lane ^ lanes;
  return cuda_emulation::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}
inline void __threadfence() { cuda_emulation::device_fence(); }
inline void __threadfence_system() { cuda_emulation::device_fence(); }
inline void __nanosleep(unsigned) { cuda_emulation::yield(); }

// Atomics.
template <class T>
CUDA_EMULATION_INLINE T atomicAdd(T* p, T value, CUDA_EMULATION_CALLER) {
  const auto add = [value](T old) {
    if constexpr (std::is_same<T, float4>::value) {
      return make_float4(old.x + value.x, old.y + value.y, old.z + value.z, old.w + value.w);
    } else {
      return T(old + value);
    }
  };
  return cuda_emulation::atomic_update(p, add, file, line);
}
template <class T>
CUDA_EMULATION_INLINE T atomicMax(T* p, T value, CUDA_EMULATION_CALLER) {
  return cuda_emulation::atomic_update(p, [value](T old) { return std::max(old, value); }, file, line);
}
template <class T>
CUDA_EMULATION_INLINE T atomicMin(T* p, T value, CUDA_EMULATION_CALLER) {
  return cuda_emulation::atomic_update(p, [value](T old) { return std::min(old, value); }, file, line);
}
template <class T>
CUDA_EMULATION_INLINE T atomicExch(T* p, T value, CUDA_EMULATION_CALLER) {
  return cuda_emulation::atomic_update(p, [value](T) { return value; }, file, line);
}
template <class T>
CUDA_EMULATION_INLINE T atomicCAS(T* p, T expected, T value, CUDA_EMULATION_CALLER) {
  return cuda_emulation::atomic_update(p, [=](T old) { return old == expected ? value : old; }, file, line);
}

// Loads and stores with cache hints, bits, conversions.
template <class T>
CUDA_EMULATION_INLINE T __ldg(const T* p) {
  return *p;
}
template <class T>
CUDA_EMULATION_INLINE T __ldcg(const T* p) {
  return *p;
}
template <class T>
CUDA_EMULATION_INLINE void __stcg(T* p, T value) {
  *p = value;
}
using std::max;
using std::min;
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline long long __float2ll_rn(float x) { return std::llrint(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline double __ll2double_rn(long long x) { return double(x); }

// Asynchronous copies, as cuda_pipeline_primitives.h names them.
CUDA_EMULATION_INLINE void __pipeline_memcpy_async(void* target, const void* source, size_t size, size_t zeros = 0,
                                                   CUDA_EMULATION_CALLER) {
  cuda_emulation::async_copy(target, source, unsigned(size), unsigned(zeros), file, line);
}
inline void __pipeline_commit() { cuda_emulation::async_commit(); }
CUDA_EMULATION_INLINE void __pipeline_wait_prior(size_t groups) { cuda_emulation::async_wait(unsigned(groups)); }
