// Products of flows that cross borders of tiles: kept on chip by a block that goes on with the next tile, handed from
// block to block through global memory where a range of tiles ends.
//
// A product with a slab has the slot of the tile in which its flow begins. Who needs it first claims the slot, makes
// the product and publishes it: stores, barrier, fence, state. All others read the state, wait until it says published,
// fence, barrier, load. A block publishes before it waits, hence who waits, waits for a block at work, for no longer
// than it would take to make the product: it is made once, whatever the order of blocks.
#pragma once

#include "flowtt/products.cuh"
#include "flowtt/schedule.cuh"

namespace flowtt {

// How the products of flows that cross a tile's borders come and go. In shared memory.
struct Borders {
  bool keeps;      // the first flow's product is in C
  bool goes_on;    // the last flow does, in the next tile
  bool front;      // the first flow's product is handed over: it is not in C, but its flow begins in an earlier tile
  bool back;       // the last flow's product is: its flow begins here, and other blocks may need it
  bool makes[2];   // this block, the first flow's product and the last one's
  int origin;      // number of the tile in which the first flow begins
  int held_at;     // place in C, counted in flows, of the product of
  int64_t held;    // this flow; -1: none
  int held_slab;   // with this slab
  int64_t loaded;  // where the slab in shared memory starts that C is made from
};

// First row of a flow that row `high` belongs to; for the first warp. The keys are in order.
__device__ __forceinline__ int first_row_of_flow(const DevicePlan& plan, int64_t flow_key, int high) {
  const int lane = threadIdx.x % 32;
  for (int low = 0; low < high;) {
    const int step = (high - low + 31) / 32, probe = low + lane * step;
    const bool reached = probe >= high || plan.row_keys[probe] >= flow_key;
    const unsigned lanes = __ballot_sync(0xffffffffu, reached);
    const int first = lanes == 0 ? 32 : __ffs(static_cast<int>(lanes)) - 1;  // of the probes in the flow
    high = min(high, low + first * step);
    if (first > 0) low += (first - 1) * step + 1;
  }
  return high;
}

// For the first warp, after decode_tile.
__device__ __forceinline__ void find_borders(Borders& borders, const Tile& tile, const DeviceBatch& batch,
                                             const DevicePlan& plan, const Schedule& schedule, TakenTile taken,
                                             bool hands_over) {
  __syncwarp();  // the tile is written
  const int lane = threadIdx.x % 32, end = tile.first + tile.count;
  const int neighbour = lane == 0 ? tile.first - 1 : lane == 1 ? end : end + schedule.tile_rows;
  const int flow = lane == 0 ? 0 : tile.num_flows - 1;
  const DeviceTable& table = batch.tables[tile.flow_table[flow]];
  bool same = false;
  if (lane < 3 && plan.counts[0] > plan.counts[1] && neighbour >= 0 && neighbour < plan.counts[0]) {
    same = (plan.row_keys[neighbour] ^ tile.flow_key[flow]) >> table.digit_shift[0] == 0;
  }
  const unsigned crosses = __ballot_sync(0xffffffffu, same);
  const bool comes = crosses & 1, goes_on = crosses & 2, beyond = crosses & 4;
  // [mutant: stale-product]
  const bool keeps = comes && borders.held == tile.flow_key[0] && borders.held_slab == tile.slab;
  const bool front = hands_over && comes && !keeps;
  const int first = front ? first_row_of_flow(plan, tile.flow_key[0], tile.first) : tile.first;
  // [mutant: earlier-handover]
  const int origin = taken.number - tile.first / schedule.tile_rows + first / schedule.tile_rows;
  __syncwarp();  // all have read what is held
  if (lane == 1) {
    borders.keeps = keeps;
    borders.goes_on = goes_on;
    borders.front = front;
    // The next tile is this block's unless this one is the last of its range.
    const bool elsewhere = beyond || taken.last;
    borders.back = hands_over && goes_on && elsewhere && !(comes && tile.num_flows == 1);
    borders.makes[0] = borders.makes[1] = true;
    borders.origin = origin;
  }
}

// Calls body(place in a flow's rows of C, place in its slot) for each float4 of a product with a slab, spread over the
// block.
template <class Body>
__device__ __forceinline__ void for_product(const DeviceTable& table, Slab slab, const Body& body) {
  const TableShape shape = table;
  const int quads = shape.rank4 / 4, each = slab.num_q * quads, count = shape.left_rows * each;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads) {
    body(i / each * slab_pitch + i % each / quads * rank_pitch + i % quads * 4, i * 4);
  }
}

struct Flows {
  int begin, end;
  __device__ __forceinline__ int count() const { return end - begin; }
};

// Flows of the batch [begin, end) whose products are made by this block.
__device__ __forceinline__ Flows made_here(const Borders& borders, const Tile& tile, int begin, int end) {
  const bool has_first = begin == 0 && (borders.keeps || !borders.makes[0]);
  const bool has_last = end == tile.num_flows && !borders.makes[1];
  return {begin + has_first, end - has_last};
}

// Claims the slots of a batch's flows [begin, end), for the whole block.
__device__ __forceinline__ void claim(const Handover& handover, Borders& borders, const Tile& tile, int begin, int end,
                                      int number) {
  const bool front = begin == 0 && borders.front, back = end == tile.num_flows && borders.back;
  if (!front && !back) return;  // uniform
  if (threadIdx.x == 0) {
    if (front) borders.makes[0] = atomicCAS(handover.states + borders.origin, 0u, 1u) == 0;
    if (back) borders.makes[1] = atomicCAS(handover.states + number, 0u, 1u) == 0;
  }
  __syncthreads();
}

// For one thread, after a barrier behind the stores.
__device__ __forceinline__ void publish(const Handover& handover, int slot) {
  __threadfence();  // [mutant: unfenced-publication]
  atomicAdd(handover.states + slot, 1u);
}

// For one thread, before a barrier and the loads: waits until the product is there.
__device__ __forceinline__ void await(const Handover& handover, int slot) {
  // [mutant: unwaited-handover]
  while (*const_cast<volatile unsigned*>(handover.states + slot) < 2) __nanosleep(64);
  __threadfence();  // [mutant: unfenced-read]
}

// Publishes what this block made, then loads what others did: of the batch of flows [begin, end). `number`: of the
// tile. For the whole block, after a barrier behind C.
__device__ __forceinline__ void hand_over(const DeviceTable& table, Slab slab, const Handover& handover,
                                          const Borders& borders, const Tile& tile, int begin, int end, int number,
                                          float* c) {
  const bool front = begin == 0 && borders.front, back = end == tile.num_flows && borders.back;
  if (!front && !back) return;  // uniform
  const bool stores_front = front && borders.makes[0], stores_back = back && borders.makes[1];
  const bool loads_front = front && !borders.makes[0], loads_back = back && !borders.makes[1];
  float* const front_slot = handover.products + int64_t{borders.origin} * handover.stride;
  float* const back_slot = handover.products + int64_t{number} * handover.stride;
  float* const back_c = c + (end - 1 - begin) * table.left_rows * table.slab_pitch;
  for_product(table, slab, [&](int i, int at) {
    if (stores_front) store4(front_slot + at, load4(c + i));
    if (stores_back) store4(back_slot + at, load4(back_c + i));
  });
  __syncthreads();  // all has been stored [mutant: early-publication]
  if (threadIdx.x == 0) {
    if (stores_front) publish(handover, borders.origin);
    if (stores_back) publish(handover, number);
    if (loads_front) await(handover, borders.origin);
    if (loads_back) await(handover, number);
  }
  if (!loads_front && !loads_back) return;  // uniform
  __syncthreads();                          // all can be loaded
  for_product(table, slab, [&](int i, int at) {
    if (loads_front) store4(c + i, __ldcg(reinterpret_cast<const float4*>(front_slot + at)));
    if (loads_back) store4(back_c + i, __ldcg(reinterpret_cast<const float4*>(back_slot + at)));
  });
  __syncthreads();
}

}  // namespace flowtt
