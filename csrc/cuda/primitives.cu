// CUB under nvcc, the standard library in the emulator: the one place where the algorithms differ.
#include "cuda/primitives.h"

#ifdef FLOWTT_CUDA_EMULATION
#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda_emulation.h"

namespace flowtt::cuda {

namespace {

template <class Key>
cudaError_t sort(void* temporary, size_t& bytes, const Key* keys, Key* sorted_keys, const int32_t* values,
                 int32_t* sorted_values, int count, int bits) {
  bytes = 1;
  if (temporary == nullptr) return cudaSuccess;
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [keys](int a, int b) { return keys[a] < keys[b]; });
  for (int i = 0; i < count; ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_values[i] = values[order[i]];
  }
  cuda_emulation::host_wrote(sorted_keys, count * sizeof *sorted_keys);
  cuda_emulation::host_wrote(sorted_values, count * sizeof *sorted_values);
  // CUB reads the keys for histograms; then a pass for every eight bits reads and writes both.
  const size_t passes = (bits + 7) / 8;
  cuda_emulation::count("bytes of the sort", count * (sizeof(Key) + passes * 2 * (sizeof(Key) + sizeof *values)));
  return cudaSuccess;
}

}  // namespace

cudaError_t sort_pairs(void* temporary, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys,
                       const int32_t* values, int32_t* sorted_values, int count, int bits, cudaStream_t) {
  return sort(temporary, bytes, keys, sorted_keys, values, sorted_values, count, bits);
}

cudaError_t sort_pairs(void* temporary, size_t& bytes, const uint64_t* keys, uint64_t* sorted_keys,
                       const int32_t* values, int32_t* sorted_values, int count, int bits, cudaStream_t) {
  return sort(temporary, bytes, keys, sorted_keys, values, sorted_values, count, bits);
}

cudaError_t running_sum(void* temporary, size_t& bytes, uint64_t* values, int count, cudaStream_t) {
  bytes = 1;
  if (temporary != nullptr) std::partial_sum(values, values + count, values);
  return cudaSuccess;
}

}  // namespace flowtt::cuda
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

namespace flowtt::cuda {

cudaError_t sort_pairs(void* temporary, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys,
                       const int32_t* values, int32_t* sorted_values, int count, int bits, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, sorted_keys, values, sorted_values, count, 0, bits,
                                         stream);
}

cudaError_t sort_pairs(void* temporary, size_t& bytes, const uint64_t* keys, uint64_t* sorted_keys,
                       const int32_t* values, int32_t* sorted_values, int count, int bits, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, sorted_keys, values, sorted_values, count, 0, bits,
                                         stream);
}

cudaError_t running_sum(void* temporary, size_t& bytes, uint64_t* values, int count, cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(temporary, bytes, values, values, count, stream);
}

}  // namespace flowtt::cuda
#endif
