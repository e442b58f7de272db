// The part of CUDA's runtime API that launchers and tests use. Everything is synchronous.
#include <cstdlib>

#include "runtime.h"

using cuda_emulation::config;

namespace {
std::unordered_map<const char*, uint64_t> amounts;  // what kernels have counted, by literals, some of them equal
int bug_awake = 0;
}  // namespace

void cuda_emulation::count(const char* name, uint64_t amount) { amounts[name] += amount; }
bool cuda_emulation::has_bug(int number) { return number == bug_awake; }

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (posix_memalign(data, 256, bytes > 0 ? bytes : 1) != 0) return cudaErrorMemoryAllocation;
  cuda_emulation::poison(*data, bytes);
  cuda_emulation::register_buffer(*data, bytes, "a cudaMalloc buffer", false);
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  cuda_emulation::unregister_buffer(data);
  std::free(data);
  return cudaSuccess;
}

// What the host writes to it is not known here.
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (posix_memalign(data, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  cuda_emulation::register_buffer(*data, bytes, "a cudaHostAlloc buffer", true);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  cuda_emulation::host_wrote(data, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  std::memcpy(target, source, bytes);
  cuda_emulation::host_wrote(target, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the CUDA emulator"; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = config().multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = config().shared_bytes;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = config().blocks_per_multiprocessor;
  return cudaSuccess;
}
}

// For the tests, by ctypes.
#pragma GCC visibility push(default)
extern "C" {
void cuda_emulation_seed(uint64_t value) { cuda_emulation::seed(value); }
void cuda_emulation_set_resident_blocks(int blocks) { config().resident_blocks = blocks; }
void cuda_emulation_set_multiprocessors(int count) { config().multiprocessors = count; }
void cuda_emulation_set_shared_bytes(int bytes) { config().shared_bytes = bytes; }
void cuda_emulation_set_max_steps(uint64_t steps) { config().max_steps = steps; }
void cuda_emulation_set_preemption(int accesses) { config().accesses_per_preemption = accesses; }
void cuda_emulation_profile(bool on) { config().profile = on; }
// Buffers of `size` bytes count as several in the profile, which begin at these bytes.
void cuda_emulation_profile_parts(uint64_t size, const uint64_t* begins, int count) {
  cuda_emulation::counters::set_parts(size, {begins, begins + count});
}
// What has been counted under that name since the last call.
uint64_t cuda_emulation_take_count(const char* name) {
  uint64_t sum = 0;
  for (auto& [literal, amount] : amounts) {
    if (std::strcmp(literal, name) == 0) sum += std::exchange(amount, 0);
  }
  return sum;
}
// Which of the bugs that mutants.py plants is awake; 0: none.
void cuda_emulation_wake_bug(int number) { bug_awake = number; }
const char* cuda_emulation_take_profile() { return cuda_emulation::take_profile().c_str(); }
}
#pragma GCC visibility pop
