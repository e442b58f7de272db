// From lookups to distinct rows.
#pragma once

#include "flowtt/device_batch.cuh"

namespace flowtt {

// Distinct row of every lookup position. A warp finds the row of its first place in the sorted order by bisection; the
// rows that start among its 32 places tell the rest.
__global__ void number_lookups(DevicePlan plan, int num_lookups, int32_t* row_of_lookup) {
  const int place = blockIdx.x * kThreads + threadIdx.x, lane = threadIdx.x % 32, first = place - lane;
  if (first >= num_lookups) return;  // the whole warp
  const int num_rows = static_cast<int>(plan.counts[0]);
  int low = 0;  // the last row that starts at or before `first`
  for (int high = num_rows; low + 1 < high;) {
    const int middle = low + (high - low) / 2;
    if (plan.row_starts[middle] <= first) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int next = low + 1 + lane;
  const int start = next < num_rows ? plan.row_starts[next] - first : 32;
  unsigned starts = start < 32 ? 1u << start : 0u;
  for (int lanes = 16; lanes > 0; lanes /= 2) starts |= __shfl_xor_sync(0xffffffffu, starts, lanes);
  if (place < num_lookups) row_of_lookup[plan.lookups[place]] = low + __popc(starts & (0xffffffffu >> (31 - lane)));
}

}  // namespace flowtt
