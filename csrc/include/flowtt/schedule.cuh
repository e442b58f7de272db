// Who works on which tiles: one 64-bit word a block, "next tile | end << 32".
//
// The block whose range it is takes tiles from the front (atomicAdd); a block without work takes the back half of
// another block's range (atomicCAS) and makes it its own. Nobody waits: every tile is taken exactly once, whoever sees
// no work left leaves, and a range in transit is finished by the thief. Neighbouring tiles stay together, so that
// middle slices and the products of long flows stay on chip. With `leave` 1 a block that has taken a tile but the last
// of its range is sure of the next one too.
#pragma once

#include "flowtt/tile.cuh"

namespace flowtt {

using TileRange = unsigned long long;

__device__ __forceinline__ TileRange tile_range(int next, int end) {
  return TileRange(unsigned(next)) | TileRange(unsigned(end)) << 32;
}

struct TakenTile {
  int number;  // -1: none is left
  bool last;   // of the block's range
};

// The block's next tile, for the first warp.
__device__ __forceinline__ TakenTile take_tile(const Schedule& schedule) {
  const unsigned lane = threadIdx.x % 32;
  int tile = -1, range_end = 0;
  if (lane == 0) {
    const TileRange range = atomicAdd(schedule.ranges + blockIdx.x, TileRange{1});
    range_end = static_cast<int>(range >> 32);
    if (static_cast<unsigned>(range) < static_cast<unsigned>(range_end)) tile = static_cast<int>(range);
  }
  tile = __shfl_sync(0xffffffffu, tile, 0);
  range_end = __shfl_sync(0xffffffffu, range_end, 0);
  if (tile >= 0 || !schedule.steal) return {tile, tile + 1 == range_end};
  for (unsigned base = 0; base < gridDim.x; base += 32) {
    const unsigned victim = (blockIdx.x + 1 + base + lane) % gridDim.x;
    for (;;) {
      const TileRange range = *const_cast<volatile TileRange*>(schedule.ranges + victim);
      const int next = static_cast<int>(range), end = static_cast<int>(range >> 32);
      const int left = base + lane < gridDim.x ? end - next : 0;
      const unsigned busy = __ballot_sync(0xffffffffu, left > schedule.leave);
      if (busy == 0) break;
      const unsigned thief = static_cast<unsigned>(__ffs(static_cast<int>(busy)) - 1);
      if (lane == thief) {
        const int from = end - (left + 1 - schedule.leave) / 2;
        if (atomicCAS(schedule.ranges + victim, range, tile_range(next, from)) == range) {  // [mutant: kept-range]
          tile = from;
          atomicExch(schedule.ranges + blockIdx.x, tile_range(from + 1, end));  // [mutant: plain-store, doubled-tile]
        }
      }
      tile = __shfl_sync(0xffffffffu, tile, static_cast<int>(thief));
      range_end = __shfl_sync(0xffffffffu, end, static_cast<int>(thief));
      if (tile >= 0) return {tile, tile + 1 == range_end};
    }
  }
  return {-1, false};
}

// For the whole block: its next tile, decoded; false if there is none. Its number is in `word`, in shared memory. The
// first warp calls `more` for what else it has to find out.
template <class More>
__device__ __forceinline__ bool next_tile(Tile& tile, int* word, const DeviceBatch& batch, const DevicePlan& plan,
                                          const Schedule& schedule, const More& more) {
  __syncthreads();  // everybody is done with the last tile
  if (threadIdx.x < 32) {
    const TakenTile taken = take_tile(schedule);
    if (taken.number >= 0) {
      decode_tile(tile, batch, plan, taken.number, schedule.tile_rows);
      more(taken);
    }
    if (threadIdx.x == 0) *word = taken.number;
  }
  __syncthreads();  // the tile can be read [mutant: tile-read-early]
  return *word >= 0;
}

}  // namespace flowtt
