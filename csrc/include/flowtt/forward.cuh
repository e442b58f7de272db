// E = left * middle * last for every distinct row.
#pragma once

#include <type_traits>

#include "flowtt/handover.cuh"
#include "flowtt/products.cuh"

namespace flowtt {

template <class Element>
struct ForwardShared {
  int tile, borders, word, left, middle, c, last;
  size_t bytes;
  __host__ __device__ explicit ForwardShared(const SharedSizes& sizes) {
    SharedPlan plan;
    tile = plan.take<Tile>(1);
    borders = plan.take<Borders>(1);
    word = plan.take<int>(1);
    left = plan.take<float>(sizes.left);
    middle = plan.take<Element>(sizes.middle);
    c = plan.take<float>(sizes.c);
    last = plan.take<Element>(sizes.last);
    bytes = plan.bytes();
  }
};

template <class Element>
struct ForwardArguments {
  DeviceBatch batch;
  DevicePlan plan;
  Schedule schedule;
  Handover handover;
  SharedSizes sizes;
  bool tf32;  // is accurate enough
  const Element* weights;
  float* rows;  // [distinct rows, row_stride]
  int row_stride;
};

template <class Element>
__global__ void __launch_bounds__(kThreads, 3) forward_rows(const __grid_constant__ ForwardArguments<Element> p) {
  FLOWTT_DYNAMIC_SHARED(raw);
  const ForwardShared<Element> at(p.sizes);
  Tile& tile = *shared_array<Tile>(raw, at.tile, 1);
  Borders& borders = *shared_array<Borders>(raw, at.borders, 1);
  int* const word = shared_array<int>(raw, at.word, 1);
  float* const left = shared_array<float>(raw, at.left, p.sizes.left);
  Element* const middle = shared_array<Element>(raw, at.middle, p.sizes.middle);
  float* const c = shared_array<float>(raw, at.c, p.sizes.c);
  Element* const last = shared_array<Element>(raw, at.last, p.sizes.last);
  if (threadIdx.x == 0) borders.held = borders.loaded = -1;

  const auto borders_of = [&](TakenTile taken) {
    find_borders(borders, tile, p.batch, p.plan, p.schedule, taken, p.handover.states != nullptr);
  };
  while (next_tile(tile, word, p.batch, p.plan, p.schedule, borders_of)) {
    for (int flow = 0, end = 0; flow < tile.num_flows; flow = end) {
      const DeviceTable& table = p.batch.tables[tile.flow_table[flow]];
      const TableShape shape = table;
      end = batch_end(tile, flow, shape.max_flows);
      const Slab slab = slab_of(table, tile.slab);
      if (slab.num_q <= 0) continue;
      const int first_row = tile.flow_first[flow], end_row = tile.flow_first[end];
      if (flow == 0 && borders.keeps && borders.held_at > 0) {  // [mutant: misplaced-product]
        for_product(table, slab, [&](int i, int) {
          store4(c + i, load4(c + borders.held_at * shape.left_rows * shape.slab_pitch + i));
        });
      }
      claim(p.handover, borders, tile, flow, end, *word);
      const Flows made = made_here(borders, tile, flow, end);
      if (threadIdx.x == 0 && tile.slab == 0) FLOWTT_COUNT("prefix products", made.count());
      if (flow > 0) __syncthreads();  // the last batch's readers are done [mutant: overwritten-slab]
      if (made.count() > 0) {
        if (borders.loaded != tile.flow_middle[flow] + slab.first_q * shape.rank) {
          load_middle(table, p.weights + tile.flow_middle[flow], slab, middle);
        }
        load_left(table, p.weights, tile, made.begin, made.end, left);
      }
      __pipeline_commit();
      load_last(table, p.weights, tile, first_row, end_row, last);  // flies while C is made
      __pipeline_commit();
      __pipeline_wait_prior(1);  // [mutant: unwaited-middle-slice]
      __syncthreads();
      if (made.count() > 0) {
        make_products<2, 4>(table, slab, p.tf32, left, middle,
                            c + (made.begin - flow) * shape.left_rows * shape.slab_pitch,
                            made.count() * shape.left_rows);
        if (threadIdx.x == 0) borders.loaded = tile.flow_middle[flow] + slab.first_q * shape.rank;
      }
      __pipeline_wait_prior(0);  // [mutant: unwaited-last-slices]
      __syncthreads();
      hand_over(table, slab, p.handover, borders, tile, flow, end, *word, c);
      if (shape.tensor_rows && shape.left_rows * slab.num_q % 16 == 0) {
        row_products_by_warps(table, slab, p.tf32, tile, flow, end, c, last, p.rows, p.row_stride);
      } else {
        with_tile_height<kIsFloat<Element> ? 4 : 2>(
            (end_row - first_row) * shape.left_rows * slab.num_q, shape.last_q4 / 4, [&](auto height) {
              row_products<height.value>(table, slab, tile, first_row, end_row, flow, c, last, p.rows, p.row_stride);
            });
      }
      if (end == tile.num_flows && threadIdx.x == 0) {
        borders.held = borders.goes_on ? tile.flow_key[end - 1] : -1;
        borders.held_slab = tile.slab;
        borders.held_at = end - 1 - flow;
      }
    }
  }
}

}  // namespace flowtt
