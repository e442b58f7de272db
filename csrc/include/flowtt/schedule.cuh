// Who works on which tiles: one 64-bit word a block, "next tile | end << 32".
//
// The owner takes tiles from the front (atomicAdd); a block without work takes the back half of another block's range
// (atomicCAS) and makes it its own. Nobody waits: every tile is taken exactly once, whoever sees no work left leaves,
// and a range in transit is finished by the thief. Neighbouring tiles stay together, so that middle slices and the
// products of long flows stay on chip.
#pragma once

#include "flowtt/device_table.h"
#include "flowtt/platform.cuh"

namespace flowtt {

using TileRange = unsigned long long;

__device__ __forceinline__ TileRange tile_range(int next, int end) {
  return TileRange(unsigned(next)) | TileRange(unsigned(end)) << 32;
}

// For the first warp: the block's next tile, or -1.
__device__ __forceinline__ int take_tile(const Schedule& schedule) {
  const unsigned lane = threadIdx.x % 32;
  int tile = -1;
  if (lane == 0) {
    const TileRange range = atomicAdd(schedule.ranges + blockIdx.x, TileRange{1});
    if (static_cast<unsigned>(range) < static_cast<unsigned>(range >> 32)) tile = static_cast<int>(range);
  }
  tile = __shfl_sync(0xffffffffu, tile, 0);
  if (tile >= 0 || !schedule.steal) return tile;
  for (unsigned base = 0; base < gridDim.x; base += 32) {
    const unsigned victim = (blockIdx.x + 1 + base + lane) % gridDim.x;
    for (;;) {
      const TileRange range = *const_cast<volatile TileRange*>(schedule.ranges + victim);
      const int next = static_cast<int>(range), end = static_cast<int>(range >> 32);
      const int left = base + lane < gridDim.x ? end - next : 0;
      const unsigned busy = __ballot_sync(0xffffffffu, left > 0);
      if (busy == 0) break;
      const unsigned thief = static_cast<unsigned>(__ffs(static_cast<int>(busy)) - 1);
      if (lane == thief) {
        const int from = end - (left + 1) / 2;
        if (atomicCAS(schedule.ranges + victim, range, tile_range(next, from)) == range) {
          tile = from;
          atomicExch(schedule.ranges + blockIdx.x, tile_range(from + 1, end));
        }
      }
      tile = __shfl_sync(0xffffffffu, tile, static_cast<int>(thief));
      if (tile >= 0) return tile;
    }
  }
  return -1;
}

}  // namespace flowtt
