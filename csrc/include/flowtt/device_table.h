// Tables as the CUDA kernels read them: descriptors, and how their matrices lie in shared memory.
#pragma once

#include <cstdint>

#include "flowtt/table.h"

namespace flowtt {

constexpr int kThreads = 256;      // of a block of every kernel
constexpr int kMaxTileRows = 32;   // distinct rows that a block takes at a time: one a lane of a warp
constexpr int kMaxLeftRows = 32;   // rows of the stacked left factors of a batch of flows
constexpr int kSmallSlab = 4096;   // elements of a slab of a middle slice
constexpr int kLargeSlab = 16384;  // rank 128 by 128
constexpr int kGradientStrip = 4;  // tiles of 16 x 8 of the middle slice's gradient that a warp makes side by side

// A row of a table is  left [left_rows, left_rank] * middle [left_rank, middle_q * rank] -> C [left_rows * middle_q,
// rank], then C * last [rank, q]. `left` is what comes before the middle core, the last but one: [1, 1] of one for two
// cores, the first core's slice for three, the product of the first two for four.
//
// A block works on a slab at a time: slab_q of the middle_q columns of `rank`. In shared memory ranks and q are padded
// with zeros to multiples of four, and rows lie an odd number of float4 apart, so that eight neighbouring ones are in
// different banks (of 16-bit middle slices an odd number of 16 bytes, as ldmatrix wants them). Middle and last are
// elements as in the weights, the others floats:
//   left   [flows * left_rows] rows of left_pitch
//   middle  [left_rank4] rows of middle_pitch, in it slab_q pieces of middle_piece
//   C      [flows * left_rows] rows of slab_pitch, in it slab_q pieces of rank_pitch
//   last   [rows] of last_pitch, in it [rank4, q4]
//   E      [rows] of row_pitch, in it [left_rows * middle_q, q4]
//
// Three sectors of 32 bytes. Functions begin with a copy: what they write might otherwise be the descriptor, for all
// that the compiler knows, and it would be read again and again.
struct alignas(32) TableShape {
  int32_t left_rows, left_rank, left_rank4, middle_q, rank, rank4, last_q, last_q4;
  int32_t slab_q, left_pitch, middle_piece, middle_pitch, rank_pitch, slab_pitch, last_pitch, row_pitch;
  int32_t num_cores;
  int32_t max_flows;  // of a batch
  int32_t aligned;    // slices start at, and their rows are, whole groups of four elements
  // What tensor cores make: C; the gradients of left and of the middle slice; E, dC and the last core's gradients.
  int32_t tensor_products, tensor_gradients, tensor_rows;
  int32_t slab_magic, last_magic;  // for divide() by slab_q and last_q
};

struct DeviceTable : TableShape {
  int64_t num_embeddings;
  int64_t core_offset[kMaxCores];
  int64_t slice_offset[kMaxCores];
  int32_t p[kMaxCores];
  int32_t q[kMaxCores];
  int32_t r[kMaxCores + 1];
  int32_t digit_shift[kMaxCores];
  int32_t slice_size[kMaxCores];
  int32_t dim;
};

struct DeviceFeature {
  int32_t table, column;
};

enum class Direction { kForward, kBackward };

// The batch and the plan, with every pointer on the device.
struct DeviceBatch {
  const DeviceTable* tables;
  const DeviceFeature* features;
  const void* offsets;
  int32_t num_tables, num_features, batch_size, num_lookups;
  int32_t table_shift;
  int32_t total_dim;
  bool wide_offsets;
};

struct DevicePlan {
  const int32_t *lookups, *bags;
  const int64_t* row_keys;
  const int32_t *row_starts, *flow_starts;
  const int64_t* counts;  // distinct rows, flows, row numbers out of range, fingerprint
  // A wave is a plan of some of the rows: row_keys and counts are its own, in `counts` also what follows; see
  // waves.cuh.
  int32_t begin_row;          // first of the rows
  const int64_t* first_flow;  // flow that this row belongs to; null: the plan is whole
};

// Who works on which tiles; see schedule.cuh.
struct Schedule {
  unsigned long long* ranges;  // one a block: next tile | end << 32
  bool steal;
  int leave;  // tiles of a range that no thief takes
  int tile_rows;
  int slabs;                // every tile is worked on for each slab of its middle slices
  int row_cost, flow_cost;  // multiply-adds; shares are of equal cost
};

// Products of flows that go on beyond a block's range of tiles; see handover.cuh. Null pointers: there are none.
struct Handover {
  float* products;   // [slabs * tiles, stride]: of the flow that begins in the tile and goes on
  unsigned* states;  // [slabs * tiles]: 0, 1 for claimed, 2 for published
  int stride, slots;
};

// Elements of the arrays in shared memory: the most that any table needs.
struct SharedSizes {
  int left, middle, c, last, row, left_gradient, kept;
};

struct Pooling {
  const float* factors;  // per-sample weights, or null
  bool mean;
};

constexpr int pad4(int64_t n) { return static_cast<int>((n + 3) / 4 * 4); }
// The least multiple of `unit`, and an odd one, that is at least n.
constexpr int odd_pitch(int64_t n, int unit = 4) { return static_cast<int>(((n + unit - 1) / unit | 1) * unit); }

// k / n for small numbers that are far below 2^16 / n, n given as magic_of(n): a multiplication on the device.
constexpr int magic_of(int n) { return (65535 + n) / n; }
constexpr int divide(int k, int magic) { return k * magic >> 16; }

// Describes a table for kernels that keep at most `slab` elements of a middle slice, of this many bytes each, in shared
// memory.
inline DeviceTable device_table(const Table& table, int slab, int element_bytes, Direction direction) {
  DeviceTable t{};
  t.num_embeddings = table.num_embeddings;
  t.num_cores = table.num_cores;
  t.dim = static_cast<int32_t>(table.dim);
  t.aligned = 1;
  for (int k = 0; k < kMaxCores; ++k) {
    t.core_offset[k] = table.core_offset[k];
    t.slice_offset[k] = table.slice_offset[k];
    t.p[k] = static_cast<int32_t>(table.p[k]);
    t.q[k] = static_cast<int32_t>(table.q[k]);
    t.r[k] = static_cast<int32_t>(table.r[k]);
    t.digit_shift[k] = table.digit_shift[k];
    t.slice_size[k] = static_cast<int32_t>(table.slice_size(k));
    if (k >= table.num_cores) continue;
    const int64_t row = k == table.last() ? table.q[k] : table.r[k + 1];
    if (row % 4 != 0 || table.core_offset[k] % 4 != 0 || table.slice_size(k) % 4 != 0) t.aligned = 0;
  }
  t.r[kMaxCores] = static_cast<int32_t>(table.r[kMaxCores]);
  const int middle = table.middle();
  t.left_rows = 1;
  for (int k = 0; k < middle; ++k) t.left_rows *= t.q[k];
  t.left_rank = t.r[middle];
  t.left_rank4 = pad4(t.left_rank);
  t.middle_q = t.q[middle];
  t.rank = t.r[middle + 1];
  t.rank4 = pad4(t.rank);
  t.last_q = t.q[middle + 1];
  t.last_q4 = pad4(t.last_q);
  t.tensor_products = t.left_rank % 8 == 0 && t.rank % 8 == 0;
  const int fit = slab / (t.left_rank4 * t.rank4);
  t.slab_q = fit < 1 ? 1 : fit < t.middle_q ? fit : t.middle_q;
  t.left_pitch = odd_pitch(t.left_rank);
  t.middle_piece = element_bytes == 4 ? odd_pitch(t.rank) : (t.rank + 7) / 8 * 8;
  // Floats are read by four rows and eight columns at a time in forward, by eight rows and four columns in backward
  // too.
  const int unit = element_bytes == 2 || direction == Direction::kForward ? 8 : 4;
  t.middle_pitch = odd_pitch(int64_t{t.slab_q} * t.middle_piece, unit);
  t.rank_pitch = odd_pitch(t.rank);
  t.slab_pitch = odd_pitch(int64_t{t.slab_q} * t.rank_pitch);
  t.last_pitch = odd_pitch(int64_t{t.rank4} * t.last_q4);
  t.row_pitch = odd_pitch(int64_t{t.left_rows} * t.middle_q * t.last_q4);
  // In backward only whole tiles and whole groups of four, and products that are divided up evenly. Of four 16-bit
  // cores the left factors would need more than 16 bits.
  const int strips = (t.slab_q * t.rank / 8 + kGradientStrip - 1) / kGradientStrip;
  t.tensor_gradients = t.num_cores > 2 && (t.num_cores == 3 || element_bytes == 4) && t.aligned &&
                       t.left_rank % 16 == 0 && t.rank % 16 == 0 && t.middle_q % t.slab_q == 0 &&
                       t.left_rank / 16 * strips <= slab / (128 * kGradientStrip);
  t.tensor_rows =
      t.tensor_gradients && t.left_rows * t.slab_q % 8 == 0 && t.left_rows <= 32 && t.slab_q <= 32 && t.last_q <= 32;
  t.slab_magic = magic_of(t.slab_q);
  t.last_magic = magic_of(t.last_q);
  return t;
}

}  // namespace flowtt
