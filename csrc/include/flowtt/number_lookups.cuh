// From lookups to distinct rows.
#pragma once

#include "flowtt/device_batch.cuh"

namespace flowtt {

// Distinct row of every lookup position, a warp 32 places of the sorted order.
__global__ void number_lookups(DevicePlan plan, int num_lookups, int32_t* row_of_lookup) {
  const int place = blockIdx.x * kThreads + threadIdx.x, first = place / 32 * 32;
  if (first >= num_lookups) return;  // the whole warp
  const int num_rows = static_cast<int>(plan.counts[0]);
  const int row = row_of_lane(plan, first, row_at(plan, num_rows, first), num_rows);
  if (place < num_lookups) row_of_lookup[plan.lookups[place]] = row;
}

}  // namespace flowtt
