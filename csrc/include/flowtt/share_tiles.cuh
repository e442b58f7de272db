// Shares of the tiles, of equal work, for the blocks of a launch to begin with.
#pragma once

#include "flowtt/schedule.cuh"

namespace flowtt {

// Tile that holds the row at which a share of `target` work ends.
__device__ __forceinline__ int tile_at(const DevicePlan& plan, const Schedule& schedule, int64_t target) {
  int low = 0;  // the last flow that begins at or before `target`
  for (int high = static_cast<int>(plan.counts[1]); low + 1 < high;) {
    const int middle = low + (high - low) / 2;
    const int64_t cost = int64_t{plan.flow_starts[middle]} * schedule.row_cost + int64_t{middle} * schedule.flow_cost;
    if (cost <= target) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t begin = int64_t{plan.flow_starts[low]} * schedule.row_cost + int64_t{low} * schedule.flow_cost;
  const int64_t rows = (target - begin - schedule.flow_cost) / schedule.row_cost;
  const int64_t row = plan.flow_starts[low] + (rows > 0 ? rows : 0);
  return static_cast<int>(min(row, int64_t{plan.flow_starts[low + 1]}) / schedule.tile_rows);
}

__global__ void share_tiles(DevicePlan plan, Schedule schedule, int blocks) {
  const int b = blockIdx.x * kThreads + threadIdx.x;
  if (b >= blocks) return;
  const int64_t rows = plan.counts[0], flows = plan.counts[1];
  const int tiles = static_cast<int>((rows + schedule.tile_rows - 1) / schedule.tile_rows);
  const int64_t work = rows * schedule.row_cost + flows * schedule.flow_cost;
  const auto begin = [&](int block) {
    const int64_t before = work * schedule.slabs * block / blocks, slab = before / work;
    return static_cast<int>(slab) * tiles + (slab < schedule.slabs ? tile_at(plan, schedule, before % work) : 0);
  };
  schedule.ranges[b] = tile_range(begin(b), begin(b + 1));
}

}  // namespace flowtt
