// From distinct rows to bags.
#pragma once

#include "flowtt/device_batch.cuh"

namespace flowtt {

// output = sums of rows, a warp a bag, in the caller's order: the same bits every time.
__global__ void pool_rows(DeviceBatch batch, Pooling pooling, const int32_t* row_of_lookup, const float* rows,
                          int row_stride, float* output) {
  const int bag = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (bag >= batch.num_features * batch.batch_size) return;
  const BagPlace place = bag_place(batch, bag);
  const int begin = static_cast<int>(offset_at(batch, bag)), end = static_cast<int>(offset_at(batch, bag + 1));
  for (int base = lane; base < place.dim; base += 32 * kColumns) {
    float sum[kColumns] = {};
#pragma unroll 2
    for (int l = begin; l < end; ++l) {
      const float factor = pooling.factors != nullptr ? pooling.factors[l] : 1.f;
      const float* const row = rows + int64_t{row_of_lookup[l]} * row_stride;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (base + 32 * i < place.dim) sum[i] += factor * row[base + 32 * i];
      }
    }
    const float scale = pooling.mean && end > begin ? 1.f / static_cast<float>(end - begin) : 1.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (base + 32 * i < place.dim) output[place.output + base + 32 * i] = scale * sum[i];
    }
  }
}

}  // namespace flowtt
