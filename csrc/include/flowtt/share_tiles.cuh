// Shares of the tiles, of equal work, for the blocks of a launch to begin with.
#pragma once

#include "flowtt/bisection.cuh"
#include "flowtt/schedule.cuh"

namespace flowtt {

// First row of a flow of the wave, counted in the wave.
__device__ __forceinline__ int flow_start(const DevicePlan& plan, int flow) {
  const int64_t first = plan.first_flow != nullptr ? *plan.first_flow : 0;
  const int64_t row = plan.flow_starts[first + flow] - plan.begin_row;
  return static_cast<int>(max(int64_t{0}, min(row, plan.counts[0])));
}

// Tile that holds the row at which a share of `target` work ends.
__device__ __forceinline__ int tile_at(const DevicePlan& plan, const Schedule& schedule, int64_t target) {
  const auto cost = [&](int flow) {
    return int64_t{flow_start(plan, flow)} * schedule.row_cost + int64_t{flow} * schedule.flow_cost;
  };
  const int num_flows = static_cast<int>(plan.counts[1]);
  const int flow = last_where(num_flows, [&](int i) { return cost(i) <= target; });
  const int64_t rows = (target - cost(flow) - schedule.flow_cost) / schedule.row_cost;
  const int row = flow_start(plan, flow) + static_cast<int>(rows > 0 ? rows : 0);
  return min(row, flow_start(plan, flow + 1)) / schedule.tile_rows;
}

__global__ void share_tiles(DevicePlan plan, Schedule schedule, int blocks) {
  const int b = blockIdx.x * kThreads + threadIdx.x;
  if (b >= blocks) return;
  const int64_t rows = plan.counts[0], flows = plan.counts[1];
  if (rows == 0) {
    schedule.ranges[b] = 0;
    return;
  }
  const int tiles = static_cast<int>((rows + schedule.tile_rows - 1) / schedule.tile_rows);
  const int64_t work = rows * schedule.row_cost + flows * schedule.flow_cost;
  const auto begin = [&](int block) {
    const int64_t before = work * schedule.slabs * block / blocks, slab = before / work;
    // [mutant: first-share]
    return static_cast<int>(slab) * tiles + (slab < schedule.slabs ? tile_at(plan, schedule, before % work) : 0);
  };
  schedule.ranges[b] = tile_range(begin(b), begin(b + 1));
}

}  // namespace flowtt
