// Core gradients from the gradients of rows.
//   a row              dlast = C^T dE,  dC += dE last^T
//   a batch of flows   dleft = dC middle^T,  dmiddle += left^T dC
// The middle slice's gradient stays in registers for as long as the block stays with one slice, which key order makes
// long.
#pragma once

#include <type_traits>

#include "flowtt/gradient_sum.cuh"
#include "flowtt/handover.cuh"
#include "flowtt/products.cuh"
#include "flowtt/schedule.cuh"
#include "flowtt/tensor_gradients.cuh"

namespace flowtt {

// In shared memory, as every thread would have to keep it: the slab that is in `middle`, and whose gradient the threads
// have. slice -1: none.
struct LoadedSlab {
  const DeviceTable* table;
  int64_t slice;
  Slab slab;
};

template <class Element>
struct BackwardShared {
  int tile, loaded, borders, word, left, middle, c, kept, last, row, left_gradient;
  size_t bytes;
  __host__ __device__ explicit BackwardShared(const SharedSizes& sizes) {
    SharedPlan plan;
    tile = plan.take<Tile>(1);
    loaded = plan.take<LoadedSlab>(1);
    borders = plan.take<Borders>(1);
    word = plan.take<int>(1);
    left = plan.take<float>(sizes.left);
    middle = plan.take<Element>(sizes.middle);
    c = plan.take<float>(sizes.c);        // C, then dC
    kept = plan.take<float>(sizes.kept);  // C of a flow that goes on in the next tile
    last = plan.take<Element>(sizes.last);
    row = plan.take<float>(sizes.row);
    left_gradient = plan.take<float>(sizes.left_gradient);
    bytes = plan.bytes();
  }
};

template <class Element, class Sum>
struct BackwardArguments {
  DeviceBatch batch;
  DevicePlan plan;
  Schedule schedule;
  SharedSizes sizes;
  bool tf32;  // is accurate enough
  const Element* weights;
  const float* row_gradients;  // [distinct rows, row_stride]
  int row_stride;
  Sum gradients;  // like the weights
};

// The gradients of the tile's rows [begin, end).
__device__ __forceinline__ void load_row_gradients(const DeviceTable& table, const Tile& tile, int begin, int end,
                                                   const float* row_gradients, int row_stride, float* to) {
  const TableShape shape = table;
  const bool aligned = shape.last_q % 4 == 0 && row_stride % 4 == 0;
  const int width = aligned ? 4 : 1, each = table.dim / width;
  const int last_q = shape.last_q, last_q4 = shape.last_q4, pitch = shape.row_pitch;
  for (int i = threadIdx.x; i < (end - begin) * each; i += kThreads) {
    const int row = begin + i / each, column = i % each * width;
    const float* const from = row_gradients + int64_t{tile.first + row} * row_stride + column;
    float* const at = to + row * pitch;
    if (aligned) {
      __pipeline_memcpy_async(at + column, from, 16);
    } else {
      __pipeline_memcpy_async(at + column / last_q * last_q4 + column % last_q, from, 4);
    }
  }
  const int pads = last_q4 - last_q, height = shape.left_rows * shape.middle_q;
  for (int i = threadIdx.x; pads > 0 && i < (end - begin) * height * pads; i += kThreads) {
    const int row = begin + i / (height * pads), m = i / pads % height;
    to[row * pitch + m * last_q4 + last_q + i % pads] = 0.f;
  }
}

// dlast = C^T dE. A thread makes four rows, rank4 / 4 apart, by four columns: neighbouring lanes then read neighbouring
// words, and write neighbouring float4.
template <class Sum>
__device__ __forceinline__ void last_gradients(const DeviceTable& table, Slab slab, const Tile& tile, int begin,
                                               int end, int first_flow, const float* c, const float* row,
                                               const Sum& gradients) {
  const TableShape shape = table;
  const int steps = shape.rank4 / 4, quads = shape.last_q4 / 4, last_q = shape.last_q, last_q4 = shape.last_q4;
  const int left_rows = shape.left_rows, middle_q = shape.middle_q, rank = shape.rank;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch, row_pitch = shape.row_pitch;
  for (int item = threadIdx.x; item < (end - begin) * steps * quads; item += kThreads) {
    const int u = begin + item / (steps * quads), h = item % quads * 4, k = item / quads % steps;
    const float* const product = c + (tile.row_flow[u] - first_flow) * left_rows * slab_pitch + k;
    const float* const gradient = row + u * row_pitch + slab.first_q * last_q4 + h;
    float4 sum[4] = {};
#pragma unroll 1
    for (int m = 0; m < left_rows; ++m) {
#pragma unroll 2
      for (int j = 0; j < slab.num_q; ++j) {
        const float4 e = load4(gradient + (m * middle_q + j) * last_q4);
        const float* const from = product + m * slab_pitch + j * rank_pitch;
#pragma unroll
        for (int i = 0; i < 4; ++i) fma4(sum[i], from[i * steps], e);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = k + i * steps;
      if (r >= rank) continue;
      const int64_t to = tile.row_last[u] + r * last_q + h;
      if (shape.aligned) {
        gradients.add4(to, sum[i]);
      } else {
        const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (h + j < last_q) gradients.add(to + j, values[j]);
        }
      }
    }
  }
}

// dC = sum over the flow's rows in this tile of dE last^T, in place of C.
template <class Element>
__device__ __forceinline__ void product_gradients(const DeviceTable& table, Slab slab, const Tile& tile, int begin,
                                                  int end, float* c, const Element* last, const float* row) {
  const TableShape shape = table;
  const int steps = shape.rank4 / 4, left_rows = shape.left_rows, height = left_rows * slab.num_q;
  const int middle_q = shape.middle_q, last_q4 = shape.last_q4, row_pitch = shape.row_pitch;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch, last_pitch = shape.last_pitch;
  for (int item = threadIdx.x; item < (end - begin) * height * steps; item += kThreads) {
    const int flow = item / (height * steps), k = item % steps, m = item / steps % height;
    const int left_row = m / slab.num_q, j = m % slab.num_q;
    const int gradient_row = (left_row * middle_q + slab.first_q + j) * last_q4;
    float sum[4] = {};
#pragma unroll 1
    for (int u = tile.flow_first[begin + flow]; u < tile.flow_first[begin + flow + 1]; ++u) {
      const float* const gradient = row + u * row_pitch + gradient_row;
      const Element* const d = last + u * last_pitch + k * last_q4;
#pragma unroll 1
      for (int h = 0; h < last_q4; h += 4) {
        const float4 e = load4(gradient + h);
#pragma unroll
        for (int i = 0; i < 4; ++i) dot4(sum[i], e, load4(d + i * steps * last_q4 + h));
      }
    }
    float* const to = c + (flow * left_rows + left_row) * slab_pitch + j * rank_pitch + k;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i * steps] = sum[i];
  }
}

// dleft = dC middle^T, given to put(row of the stacked left factors, column, value).
template <int TM, class Element, class Put>
__device__ __forceinline__ void left_gradients(const DeviceTable& table, Slab slab, const float* c,
                                               const Element* middle, int rows, const Put& put) {
  const TableShape shape = table;
  const int steps = shape.left_rank4 / 4, groups = (rows + TM - 1) / TM, left_rank = shape.left_rank;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch, depth = shape.rank4;
  const int middle_pitch = shape.middle_pitch, middle_piece = shape.middle_piece;
  for (int item = threadIdx.x; item < groups * steps; item += kThreads) {
    const int group = item / steps, k = item % steps;
    const float* a[TM];
#pragma unroll
    for (int i = 0; i < TM; ++i) a[i] = c + min(group + i * groups, rows - 1) * slab_pitch;
    float sum[TM][4] = {};
    for (int j = 0; j < slab.num_q; ++j) {
#pragma unroll 1
      for (int r = 0; r < depth; r += 4) {
        float4 b[4];
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          b[l] = load4(middle + (k + l * steps) * middle_pitch + j * middle_piece + r);
        }
#pragma unroll
        for (int i = 0; i < TM; ++i) {
          const float4 x = load4(a[i] + j * rank_pitch + r);
#pragma unroll
          for (int l = 0; l < 4; ++l) dot4(sum[i][l], x, b[l]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      if (group + i * groups >= rows) continue;
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        if (k + l * steps < left_rank) put(group + i * groups, k + l * steps, sum[i][l]);
      }
    }
  }
}

// Four cores: from the gradient of left = G_1 * G_2 to those of G_1 and G_2.
template <class Element, class Sum>
__device__ __forceinline__ void split_left_gradients(const DeviceTable& table, const Tile& tile, int begin, int end,
                                                     const Element* weights, const float* left_gradient,
                                                     const Sum& gradients) {
  const int q1 = table.q[0], q2 = table.q[1], r1 = table.r[1], r2 = table.left_rank;
  const int left_rows = table.left_rows, pitch = table.left_pitch;
  for (int i = threadIdx.x; i < (end - begin) * q1 * r1; i += kThreads) {
    const int flow = i / (q1 * r1), m = i / r1 % q1, k = i % r1;
    const Element* const second = weights + tile.flow_left[1][begin + flow] + k * q2 * r2;
    float sum = 0.f;
#pragma unroll 1
    for (int j = 0; j < q2; ++j) {
      const float* const gradient = left_gradient + (flow * left_rows + m * q2 + j) * pitch;
      for (int r = 0; r < r2; ++r) sum += gradient[r] * read(second + j * r2 + r);
    }
    gradients.add(tile.flow_left[0][begin + flow] + m * r1 + k, sum);
  }
  for (int i = threadIdx.x; i < (end - begin) * r1 * q2 * r2; i += kThreads) {
    const int flow = i / (r1 * q2 * r2), k = i / (q2 * r2) % r1, j = i / r2 % q2, r = i % r2;
    const Element* const first = weights + tile.flow_left[0][begin + flow] + k;
    float sum = 0.f;
    for (int m = 0; m < q1; ++m) {
      sum += read(first + m * r1) * left_gradient[(flow * left_rows + m * q2 + j) * pitch + r];
    }
    gradients.add(tile.flow_left[1][begin + flow] + (k * q2 + j) * r2 + r, sum);
  }
}

// dmiddle of one slab, in registers: 16 numbers a thread for every 4096 of a slab. As four rows of four for each TILES,
// or as strips of tensor core tiles.
template <int TILES>
class MiddleGradient {
 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < kGradientStrip; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum_[t][i][j] = 0.f;
      }
    }
  }

  // += left^T dC
  template <bool kSplitLeft>
  __device__ __forceinline__ void add(const DeviceTable& table, Slab slab, bool tf32, const float* left, const float* c,
                                      int rows) {
    const TableShape shape = table;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (shape.tensor_gradients) {
        const GradientStrip strip(shape, slab, t);
        if (strip.valid) add_middle_gradients<kSplitLeft>(shape, slab, tf32, strip, left, c, rows, sum_[t]);
        continue;
      }
      const Place place(shape, slab, t);
      if (!place.valid) continue;
      const int column = place.j * shape.rank_pitch + place.r;
#pragma unroll 2
      for (int m = 0; m < rows; ++m) {
        const float4 a = load4(left + m * shape.left_pitch + place.k);
        const float4 b = load4(c + m * shape.slab_pitch + column);
        fma4(sum_[t][0], a.x, b);
        fma4(sum_[t][1], a.y, b);
        fma4(sum_[t][2], a.z, b);
        fma4(sum_[t][3], a.w, b);
      }
    }
  }

  // Adds the sum to the gradient of the slice, and starts anew.
  template <class Sum>
  __device__ __forceinline__ void flush(const DeviceTable& table, Slab slab, int64_t slice, const Sum& gradients) {
    const TableShape shape = table;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const Place place(shape, slab, t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int64_t column = (slab.first_q + place.j) * shape.rank + place.r;
        int row = place.k + i;
        bool valid = place.valid && row < shape.left_rank;
        float4 value = make_float4(sum_[t][i][0], sum_[t][i][1], sum_[t][i][2], sum_[t][i][3]);
        if (shape.tensor_gradients) {
          const GradientStrip strip(shape, slab, t);
          const Quad quad = quad_of(sum_[t][i]);
          row = strip.row + quad.row;
          column = slab.first_q * shape.rank + (strip.column + i) * 8 + quad.column;  // [mutant: first-slab]
          valid = strip.valid && (strip.column + i) * 8 < slab.num_q * shape.rank;
          value = quad.value;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) sum_[t][i][j] = 0.f;
        if (!valid) continue;
        const int64_t to = slice + int64_t{row} * shape.middle_q * shape.rank + column;
        if (shape.aligned) {
          gradients.add4(to, value);
          continue;
        }
        gradients.add(to, value.x);
        if (place.r + 1 < shape.rank) gradients.add(to + 1, value.y);
        if (place.r + 2 < shape.rank) gradients.add(to + 2, value.z);
        if (place.r + 3 < shape.rank) gradients.add(to + 3, value.w);
      }
    }
  }

 private:
  struct Place {
    bool valid;
    int k, j, r;
    __device__ __forceinline__ Place(const TableShape& table, Slab slab, int t) {
      const int quads = table.rank4 / 4, columns = slab.num_q * quads, item = threadIdx.x + t * kThreads;
      valid = item < table.left_rank4 / 4 * columns;
      k = item / columns * 4;
      j = item % columns / quads;
      r = item % quads * 4;
    }
  };
  float sum_[TILES][kGradientStrip][4];
};

template <class Element, class Sum, int SLAB>
__global__ void __launch_bounds__(kThreads, SLAB == kSmallSlab ? 2 : 1)
    backward_cores(const __grid_constant__ BackwardArguments<Element, Sum> p) {
  FLOWTT_DYNAMIC_SHARED(raw);
  const BackwardShared<Element> at(p.sizes);
  Tile& tile = *shared_array<Tile>(raw, at.tile, 1);
  int* const word = shared_array<int>(raw, at.word, 1);
  float* const left = shared_array<float>(raw, at.left, p.sizes.left);
  Element* const middle = shared_array<Element>(raw, at.middle, p.sizes.middle);
  float* const c = shared_array<float>(raw, at.c, p.sizes.c);
  Element* const last = shared_array<Element>(raw, at.last, p.sizes.last);
  float* const row = shared_array<float>(raw, at.row, p.sizes.row);
  float* const left_gradient = shared_array<float>(raw, at.left_gradient, p.sizes.left_gradient);
  MiddleGradient<SLAB / (16 * kThreads)> middle_gradient;
  middle_gradient.clear();
  LoadedSlab& loaded = *shared_array<LoadedSlab>(raw, at.loaded, 1);
  Borders& borders = *shared_array<Borders>(raw, at.borders, 1);
  float* const kept = shared_array<float>(raw, at.kept, p.sizes.kept);
  if (threadIdx.x == 0) loaded.slice = borders.held = -1;

  const auto borders_of = [&](TakenTile taken) {
    find_borders(borders, tile, p.batch, p.plan, p.schedule, taken, false);
  };
  while (next_tile(tile, word, p.batch, p.plan, p.schedule, borders_of)) {
    for (int flow = 0, end = 0; flow < tile.num_flows; flow = end) {
      const DeviceTable& table = p.batch.tables[tile.flow_table[flow]];
      end = batch_end(tile, flow, table.max_flows);
      const Slab slab = slab_of(table, tile.slab);
      if (slab.num_q <= 0) continue;
      const int first_row = tile.flow_first[flow], end_row = tile.flow_first[end];
      const int left_rows = (end - flow) * table.left_rows;
      const int64_t slice = tile.flow_middle[flow];
      const bool is_loaded = loaded.slice == slice && loaded.slab.first_q == slab.first_q;
      if (!is_loaded && loaded.slice >= 0) {  // [mutant: misdirected-gradient]
        middle_gradient.flush(*loaded.table, loaded.slab, loaded.slice, p.gradients);
      }
      if (flow > 0) __syncthreads();  // the last batch's readers are done
      if (!is_loaded) load_middle(table, p.weights + slice, slab, middle);
      load_left(table, p.weights, tile, flow, end, left);
      __pipeline_commit();
      load_last(table, p.weights, tile, first_row, end_row, last);  // flies while C is made
      load_row_gradients(table, tile, first_row, end_row, p.row_gradients, p.row_stride, row);
      __pipeline_commit();
      __pipeline_wait_prior(1);
      __syncthreads();
      if (threadIdx.x == 0) loaded = {&table, slice, slab};
      const bool keeps = flow == 0 && borders.keeps, goes_on = end == tile.num_flows && borders.goes_on;
      if (keeps) for_product(table, slab, [&](int i, int at) { store4(c + i, load4(kept + at)); });
      if (const int first = keeps ? table.left_rows : 0; first < left_rows) {
        make_products<2, 2>(table, slab, p.tf32, left + first * table.left_pitch, middle, c + first * table.slab_pitch,
                            left_rows - first);
      }
      __pipeline_wait_prior(0);
      __syncthreads();
      if (goes_on && !(keeps && tile.num_flows == 1)) {  // [mutant: unkept-product]
        const float* const last_c = c + (left_rows - table.left_rows) * table.slab_pitch;
        for_product(table, slab, [&](int i, int at) { store4(kept + at, load4(last_c + i)); });
      }
      if (end == tile.num_flows && threadIdx.x == 0) {
        borders.held = goes_on ? tile.flow_key[end - 1] : -1;
        borders.held_slab = tile.slab;
      }
      if (table.tensor_rows) {
        last_gradients_by_warps(table, slab, p.tf32, tile, flow, end, c, row, p.gradients);
      } else {
        last_gradients(table, slab, tile, first_row, end_row, flow, c, row, p.gradients);
      }
      __syncthreads();  // C has been read: dC takes its place [mutant: overwritten-product]
      if (table.tensor_rows) {
        product_gradients_by_warps(table, slab, p.tf32, tile, flow, end, c, last, row);
      } else {
        product_gradients(table, slab, tile, flow, end, c, last, row);
      }
      __syncthreads();
      const TableShape shape = table;
      const int each = shape.left_rows, left_rank = shape.left_rank, left_pitch = shape.left_pitch;
      const bool three_cores = shape.num_cores == 3;
      const auto left_gradient_of = [&](int left_row, int k) {  // three cores: an element of the weights
        return tile.flow_left[0][flow + left_row / each] + left_row % each * left_rank + k;
      };
      if (shape.tensor_gradients) {
        const auto put = [&](int left_row, int k, float4 values) {
          if (three_cores) {
            p.gradients.add4(left_gradient_of(left_row, k), values);
          } else {
            store4(left_gradient + left_row * left_pitch + k, values);
          }
        };
        left_gradients_by_warps<2>(table, slab, p.tf32, c, middle, left_rows, put);
      } else if (shape.num_cores > 2) {
        const auto put = [&](int left_row, int k, float value) {
          if (three_cores) {
            p.gradients.add(left_gradient_of(left_row, k), value);
          } else {
            left_gradient[left_row * left_pitch + k] = value;
          }
        };
        with_tile_height<SLAB == kSmallSlab ? 1 : 2>(left_rows, shape.left_rank4 / 4, [&](auto height) {
          left_gradients<height.value>(table, slab, c, middle, left_rows, put);
        });
      }
      middle_gradient.template add<kIsFloat<Element>>(table, slab, p.tf32, left, c, left_rows);
      if (shape.num_cores == 4) {
        __syncthreads();
        split_left_gradients(table, tile, flow, end, p.weights, left_gradient, p.gradients);
      }
    }
    if (Sum::kDeterministic && loaded.slice >= 0) {  // float sums must not depend on which tiles a block takes
      middle_gradient.flush(*loaded.table, loaded.slab, loaded.slice, p.gradients);
    }
  }
  if (!Sum::kDeterministic && loaded.slice >= 0) {  // [mutant: dropped-gradient]
    middle_gradient.flush(*loaded.table, loaded.slab, loaded.slice, p.gradients);
  }
}

}  // namespace flowtt
