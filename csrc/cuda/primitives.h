// Device-wide primitives. With `temporary` null they only say how many bytes of it they need.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flowtt::cuda {

// Stable sort by bits [0, bits) of the keys.
cudaError_t sort_pairs(void* temporary, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys,
                       const int32_t* values, int32_t* sorted_values, int count, int bits, cudaStream_t stream);
cudaError_t sort_pairs(void* temporary, size_t& bytes, const uint64_t* keys, uint64_t* sorted_keys,
                       const int32_t* values, int32_t* sorted_values, int count, int bits, cudaStream_t stream);

// Inclusive, in place.
cudaError_t running_sum(void* temporary, size_t& bytes, uint64_t* values, int count, cudaStream_t stream);

}  // namespace flowtt::cuda
