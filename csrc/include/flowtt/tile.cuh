// A tile: up to 32 consecutive distinct rows, decoded from their keys, and the batches of flows in it.
#pragma once

#include "flowtt/device_table.h"
#include "flowtt/element.cuh"

namespace flowtt {

// In shared memory. Offsets are into the weights.
struct Tile {
  int first, count;  // distinct rows
  int num_flows;
  int slab;                           // number of the slab of middle slices to work on
  int row_flow[kMaxTileRows];         // flow, counted in the tile
  int64_t row_last[kMaxTileRows];     // slice of the last core
  int64_t flow_key[kMaxTileRows];     // equal for rows of one flow, whatever the tile
  int64_t flow_middle[kMaxTileRows];  // slice of the last core but one
  int64_t flow_left[2][kMaxTileRows];
  int flow_table[kMaxTileRows];
  int flow_first[kMaxTileRows + 1];  // first row of each flow, counted in the tile
  int middle_end[kMaxTileRows];      // flow after the last of those from it on that share its middle slice
};

FLOWTT_INLINE int64_t slice_at(const DeviceTable& table, int64_t key, int k) {
  const int bits = 32 - __clz(table.p[k] - 1);
  const int64_t digit = key >> table.digit_shift[k] & ((int64_t{1} << bits) - 1);
  return table.core_offset[k] + digit * table.slice_size[k];
}

// For the first warp; a lane a row. Numbers go through all tiles for the first slab, then for the second, and so on.
__device__ __forceinline__ void decode_tile(Tile& tile, const DeviceBatch& batch, const DevicePlan& plan, int number,
                                            int tile_rows) {
  const int num_rows = static_cast<int>(plan.counts[0]), tiles = (num_rows + tile_rows - 1) / tile_rows;
  const int lane = threadIdx.x % 32, first = number % tiles * tile_rows;
  const bool one_row_flows = plan.counts[0] == plan.counts[1];
  const int count = min(tile_rows, num_rows - first);
  const bool mine = lane < count;
  const int64_t key = plan.row_keys[first + (mine ? lane : 0)];
  const int64_t before = __shfl_up_sync(0xffffffffu, key, 1);
  const int number_of_table = static_cast<int>(key >> batch.table_shift);
  const DeviceTable& table = batch.tables[number_of_table];
  const bool head = mine && (lane == 0 || one_row_flows || (key ^ before) >> table.digit_shift[0] != 0);
  const unsigned heads = __ballot_sync(0xffffffffu, head);
  const int64_t middle = slice_at(table, key, table.num_cores - 2);
  const int64_t middle_before = __shfl_up_sync(0xffffffffu, middle, 1);
  // [mutant: mixed-flow]
  const unsigned middles = __ballot_sync(0xffffffffu, mine && lane > 0 && middle != middle_before);
  if (mine) {
    const int flow = __popc(heads & (0xffffffffu >> (31 - lane))) - 1, last = table.num_cores - 1;
    tile.row_flow[lane] = flow;
    tile.row_last[lane] = slice_at(table, key, last);
    if (head) {
      tile.flow_key[flow] = one_row_flows ? first + lane : key >> table.digit_shift[0] << table.digit_shift[0];
      tile.flow_middle[flow] = middle;
      const unsigned next =
          middles & ~(0xffffffffu >> (31 - lane));  // lanes after this one where a middle slice begins
      tile.middle_end[flow] = __popc(next == 0 ? heads : heads & ((next & (0u - next)) - 1));
      for (int k = 0; k < 2; ++k) tile.flow_left[k][flow] = k < last - 1 ? slice_at(table, key, k) : 0;
      tile.flow_table[flow] = number_of_table;
      tile.flow_first[flow] = lane;
    }
  }
  if (lane == 0) {
    const int num_flows = __popc(heads);
    tile.first = first;
    tile.count = count;
    tile.num_flows = num_flows;
    tile.slab = number / tiles;
    tile.flow_first[num_flows] = count;  // [mutant: short-flow]
  }
}

// Flows from `flow` on that can be worked on together: they share the middle slice.
__device__ __forceinline__ int batch_end(const Tile& tile, int flow, int max_flows) {
  return min(tile.middle_end[flow], flow + max_flows);
}

// A slab of the middle slice: `num_q` of its columns of `rank`, from `first_q` on.
struct Slab {
  int first_q, num_q;
};

FLOWTT_INLINE Slab slab_of(const DeviceTable& table, int number) {
  const int slab_q = table.slab_q, first_q = number * slab_q;
  return {first_q, min(slab_q, table.middle_q - first_q)};
}

// A warp's part of a product that has a column for every column of a flow's rows.
struct FlowStrip {
  int part, flow;       // of several parts of the product; flow, counted in the batch
  int first_row;        // of the flow, counted in the tile
  int column, columns;  // the first of eight, and how many the flow has
};

// All such parts for flows [begin, end), at most 32. For whole warps: a lane keeps what there is of one flow.
class FlowStrips {
 public:
  __device__ __forceinline__ FlowStrips(const TableShape& shape, const Tile& tile, int begin, int end, int parts)
      : parts_(parts), width_(shape.last_q) {
    const int lane = threadIdx.x % 32, flow = min(begin + lane, end);
    const int first = tile.flow_first[flow], rows = tile.flow_first[min(flow + 1, end)] - first;
    int strips = (rows * width_ + 7) / 8;
    int until = strips;  // running sum
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, until, lanes);
      if (lane >= lanes) until += before;
    }
    start_ = until - strips;
    flow_ = first << 16 | rows;
    count_ = __shfl_sync(0xffffffffu, until, 31);
    if (begin + lane >= end) start_ = count_;
  }
  __device__ __forceinline__ int count() const { return count_ * parts_; }
  __device__ __forceinline__ FlowStrip operator[](int item) const {
    const int strip = item / parts_;
    const int flow = __popc(__ballot_sync(0xffffffffu, start_ <= strip)) - 1;
    const int rows = __shfl_sync(0xffffffffu, flow_, flow);
    const int start = __shfl_sync(0xffffffffu, start_, flow);
    return {item % parts_, flow, rows >> 16, (strip - start) * 8, (rows & 0xffff) * width_};
  }

 private:
  int parts_, width_;
  int start_, flow_;  // of the lane's flow: number of its first strip; first row and rows
  int count_;         // strips
};

// Copies a matrix [rows, columns] of the weights to shared memory, rows `pitch` apart, padded with zeros to multiples
// of four. Asynchronous: commit and wait. `row_stride` is that of the source.
template <class Element>
__device__ __forceinline__ void copy_matrix(Element* to, int pitch, const Element* from, int row_stride, int rows,
                                            int columns, bool aligned) {
  if (aligned) {
    const int quads = columns / 4;
    for (int i = threadIdx.x; i < rows * quads; i += kThreads) {
      const int row = i / quads, column = i % quads * 4;
      copy4(to + row * pitch + column, from + int64_t{row} * row_stride + column);
    }
    return;
  }
  const int columns4 = pad4(columns);
  for (int i = threadIdx.x; i < pad4(rows) * columns4; i += kThreads) {
    const int row = i / columns4, column = i % columns4;
    if (row < rows && column < columns) {
      copy1(to + row * pitch + column, from + int64_t{row} * row_stride + column);
    } else {
      to[row * pitch + column] = Element{};
    }
  }
}

// The left factors of flows [begin, end), stacked, as floats.
template <class Element>
__device__ __forceinline__ void load_left(const DeviceTable& table, const Element* weights, const Tile& tile, int begin,
                                          int end, float* left) {
  const TableShape shape = table;
  const int left_rows = shape.left_rows, left_rank = shape.left_rank, pitch = shape.left_pitch;
  if (shape.num_cores == 3) {
    const bool aligned = shape.aligned != 0;
    const int quads = shape.left_rank4 / 4, each = left_rows * quads;
    for (int i = threadIdx.x; i < (end - begin) * each; i += kThreads) {
      const int flow = i / each, row = i % each / quads, column = i % quads * 4;
      const Element* const from = weights + tile.flow_left[0][begin + flow] + row * left_rank + column;
      float* const to = left + (flow * left_rows + row) * pitch + column;
      if (aligned) {
        copy4(to, from);
        continue;
      }
      for (int k = 0; k < 4; ++k) {
        if (column + k < left_rank) {
          copy1(to + k, from + k);
        } else {
          to[k] = 0.f;
        }
      }
    }
    return;
  }
  const int num_cores = shape.num_cores, q2 = table.q[1], r1 = table.r[1];
  const int columns4 = shape.left_rank4, each = left_rows * columns4;
  for (int i = threadIdx.x; i < (end - begin) * each; i += kThreads) {
    const int flow = i / each, row = i % each / columns4, column = i % columns4;
    float sum = 0.f;
    if (num_cores == 2) {
      sum = column == 0 ? 1.f : 0.f;
    } else if (column < left_rank) {  // G_1 * G_2
      const Element* const first = weights + tile.flow_left[0][begin + flow] + row / q2 * r1;
      const Element* const second = weights + tile.flow_left[1][begin + flow] + row % q2 * left_rank + column;
      for (int k = 0; k < r1; ++k) sum += read(first + k) * read(second + k * q2 * left_rank);
    }
    left[(flow * left_rows + row) * pitch + column] = sum;
  }
}

template <class Element>
__device__ __forceinline__ void load_middle(const DeviceTable& table, const Element* slice, Slab slab,
                                            Element* middle) {
  const TableShape shape = table;
  const int rank = shape.rank, stride = shape.middle_q * rank, rows = shape.left_rank;
  const int piece = shape.middle_piece, pitch = shape.middle_pitch;
  const bool aligned = shape.aligned != 0 && rows % 4 == 0;
  for (int j = 0; j < slab.num_q; ++j) {
    copy_matrix(middle + j * piece, pitch, slice + (slab.first_q + j) * rank, stride, rows, rank, aligned);
  }
}

// The last core's slices of the tile's rows [begin, end).
template <class Element>
__device__ __forceinline__ void load_last(const DeviceTable& table, const Element* weights, const Tile& tile, int begin,
                                          int end, Element* last) {
  const TableShape shape = table;
  if (shape.aligned != 0 && shape.rank % 4 == 0) {
    const int quads = shape.rank * shape.last_q / 4, pitch = shape.last_pitch;
    for (int i = threadIdx.x; i < (end - begin) * quads; i += kThreads) {
      const int row = begin + i / quads, column = i % quads * 4;
      copy4(last + row * pitch + column, weights + tile.row_last[row] + column);
    }
    return;
  }
  for (int row = begin; row < end; ++row) {
    copy_matrix(last + row * shape.last_pitch, shape.last_q4, weights + tile.row_last[row], shape.last_q, shape.rank,
                shape.last_q, false);
  }
}

}  // namespace flowtt
