// From distinct rows to bags.
#pragma once

#include "flowtt/device_batch.cuh"

namespace flowtt {

// output = sums of rows, a warp a bag, in the caller's order: the same bits every time. Of the plan's wave; all but the
// first add to the output.
__device__ __forceinline__ void pool_bag(const DeviceBatch& batch, const DevicePlan& plan, const WaveRows& wave,
                                         const Pooling& pooling, int bag, const int32_t* row_of_lookup,
                                         const float* rows, int row_stride, float* output) {
  const int lane = threadIdx.x % 32;
  const BagPlace place = bag_place(batch, bag);
  const int begin = static_cast<int>(offset_at(batch, bag));
  // A failed batch's offsets may be anything.
  const int end = has_no_rows(plan) ? begin : static_cast<int>(offset_at(batch, bag + 1));
  for (int base = lane; base - lane < place.dim; base += 32 * kColumns) {
    float sum[kColumns] = {};
    bool empty = true;
    for (int first = begin; first < end; first += 32) {  // a lane reads the number of one lookup
      const int count = min(32, end - first), mine = first + min(lane, count - 1);
      const int number = wave(row_of_lookup[mine]);
      const float factor = pooling.factors != nullptr ? pooling.factors[mine] : 1.f;
      empty = empty && __ballot_sync(0xffffffffu, number >= 0) == 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const int number_j = __shfl_sync(0xffffffffu, number, j);
        const float factor_j = __shfl_sync(0xffffffffu, factor, j);
        const float* const row = rows + int64_t{number_j} * row_stride;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (number_j >= 0 && base + 32 * i < place.dim) sum[i] += factor_j * row[base + 32 * i];
        }
      }
    }
    if (plan.begin_row > 0 && empty) continue;
    const float scale = pooling.mean && end > begin ? 1.f / static_cast<float>(end - begin) : 1.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (base + 32 * i >= place.dim) continue;
      float& to = output[place.output + base + 32 * i];
      to = plan.begin_row > 0 ? to + scale * sum[i] : scale * sum[i];  // [mutant: overwritten-bags]
    }
  }
}

__global__ void pool_rows(DeviceBatch batch, DevicePlan plan, Pooling pooling, const int32_t* row_of_lookup,
                          const float* rows, int row_stride, float* output) {
  const WaveRows wave(plan);
  if (plan.begin_row > 0 && plan.counts[0] == 0) return;
  for (int bag = blockIdx.x * kWarps + threadIdx.x / 32; bag < batch.num_features * batch.batch_size;
       bag += gridDim.x * kWarps) {
    pool_bag(batch, plan, wave, pooling, bag, row_of_lookup, rows, row_stride, output);
  }
}

}  // namespace flowtt
