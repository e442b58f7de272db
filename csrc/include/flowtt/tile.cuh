// A tile: up to 32 consecutive distinct rows, decoded from their keys, and the batches of flows in it.
#pragma once

#include "flowtt/device_table.h"
#include "flowtt/element.cuh"

namespace flowtt {

// In shared memory. Offsets are into the weights.
struct Tile {
  int first, count;  // distinct rows
  int num_flows;
  int slab;                          // number of the slab of middle slices to work on
  int row_flow[kMaxTileRows];        // flow, counted in the tile
  int64_t row_last[kMaxTileRows];    // slice of the last core
  int64_t flow_key[kMaxTileRows];    // equal for rows of one flow, whatever the tile
  int64_t flow_owner[kMaxTileRows];  // slice of the last core but one
  int64_t flow_left[2][kMaxTileRows];
  int flow_table[kMaxTileRows];
  int flow_first[kMaxTileRows + 1];  // first row of each flow, counted in the tile
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
  if (mine) {
    const int flow = __popc(heads & (0xffffffffu >> (31 - lane))) - 1, last = table.num_cores - 1;
    tile.row_flow[lane] = flow;
    tile.row_last[lane] = slice_at(table, key, last);
    if (head) {
      tile.flow_key[flow] = one_row_flows ? first + lane : key >> table.digit_shift[0] << table.digit_shift[0];
      tile.flow_owner[flow] = slice_at(table, key, last - 1);
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
    tile.flow_first[num_flows] = count;
  }
}

// Flows from `flow` on that can be worked on together: they share the owner's slice.
__device__ __forceinline__ int batch_end(const Tile& tile, int flow, int max_flows) {
  const int limit = min(tile.num_flows, flow + max_flows);
  int end = flow + 1;
  while (end < limit && tile.flow_owner[end] == tile.flow_owner[flow]) ++end;
  return end;
}

// A slab of the middle slice: `num_q` of its columns of `rank`, from `first_q` on.
struct Slab {
  int first_q, num_q;
};

FLOWTT_INLINE Slab slab_of(const DeviceTable& table, int number) {
  const int first_q = number * table.slab_q;
  return {first_q, min(table.slab_q, table.owner_q - first_q)};
}

// A warp's part of a product that has a column for every column of a flow's rows.
struct FlowStrip {
  int part, flow;       // of several parts of the product; flow, counted in the batch
  int first_row;        // of the flow, counted in the tile
  int column, columns;  // the first of eight, and how many the flow has

  FLOWTT_INLINE bool empty() const { return column >= columns; }
};

// All such parts for flows [begin, end): as many for each as the longest can have, so some are empty.
class FlowStrips {
 public:
  FLOWTT_INLINE FlowStrips(const DeviceTable& table, const Tile& tile, int begin, int end, int parts)
      : tile_(tile), begin_(begin), flows_(end - begin), parts_(parts), width_(table.last_q) {}
  FLOWTT_INLINE int count() const {
    const int longest = tile_.flow_first[begin_ + flows_] - tile_.flow_first[begin_] - flows_ + 1;
    return (longest * width_ + 7) / 8 * flows_ * parts_;
  }
  FLOWTT_INLINE FlowStrip operator[](int item) const {
    const int flow = item / parts_ % flows_, first = tile_.flow_first[begin_ + flow];
    return {item % parts_, flow, first, item / (parts_ * flows_) * 8,
            (tile_.flow_first[begin_ + flow + 1] - first) * width_};
  }

 private:
  const Tile& tile_;
  int begin_, flows_, parts_, width_;
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
  if (table.num_cores == 3) {
    const int quads = table.left_rank4 / 4, each = table.left_rows * quads;
    for (int i = threadIdx.x; i < (end - begin) * each; i += kThreads) {
      const int flow = i / each, row = i % each / quads, column = i % quads * 4;
      const Element* const from = weights + tile.flow_left[0][begin + flow] + row * table.left_rank + column;
      float* const to = left + (flow * table.left_rows + row) * table.left_pitch + column;
      if (table.aligned) {
        copy4(to, from);
        continue;
      }
      for (int k = 0; k < 4; ++k) {
        if (column + k < table.left_rank) {
          copy1(to + k, from + k);
        } else {
          to[k] = 0.f;
        }
      }
    }
    return;
  }
  const int columns4 = table.left_rank4, each = table.left_rows * columns4;
  for (int i = threadIdx.x; i < (end - begin) * each; i += kThreads) {
    const int flow = i / each, row = i % each / columns4, column = i % columns4;
    float sum = 0.f;
    if (table.num_cores == 2) {
      sum = column == 0 ? 1.f : 0.f;
    } else if (column < table.left_rank) {  // G_1 * G_2
      const int q2 = table.q[1], r1 = table.r[1];
      const Element* const first = weights + tile.flow_left[0][begin + flow] + row / q2 * r1;
      const Element* const second = weights + tile.flow_left[1][begin + flow] + row % q2 * table.left_rank + column;
      for (int k = 0; k < r1; ++k) sum += read(first + k) * read(second + k * q2 * table.left_rank);
    }
    left[(flow * table.left_rows + row) * table.left_pitch + column] = sum;
  }
}

template <class Element>
__device__ __forceinline__ void load_owner(const DeviceTable& table, const Element* slice, Slab slab, Element* owner) {
  for (int j = 0; j < slab.num_q; ++j) {
    copy_matrix(owner + j * table.owner_piece, table.owner_pitch, slice + (slab.first_q + j) * table.rank,
                table.owner_q * table.rank, table.left_rank, table.rank,
                table.aligned != 0 && table.left_rank % 4 == 0);
  }
}

// The last core's slices of the tile's rows [begin, end).
template <class Element>
__device__ __forceinline__ void load_last(const DeviceTable& table, const Element* weights, const Tile& tile, int begin,
                                          int end, Element* last) {
  if (table.aligned != 0 && table.rank % 4 == 0) {
    const int quads = table.rank * table.last_q / 4;
    for (int i = threadIdx.x; i < (end - begin) * quads; i += kThreads) {
      const int row = begin + i / quads, column = i % quads * 4;
      copy4(last + row * table.last_pitch + column, weights + tile.row_last[row] + column);
    }
    return;
  }
  for (int row = begin; row < end; ++row) {
    copy_matrix(last + row * table.last_pitch, table.last_q4, weights + tile.row_last[row], table.last_q, table.rank,
                table.last_q, false);
  }
}

}  // namespace flowtt
