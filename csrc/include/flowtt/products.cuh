// Products of small matrices in shared memory, by all threads of a block: C = left * middle, E = C * last. Shapes and
// pitches: device_table.h.
#pragma once

#include "flowtt/tensor_cores.cuh"
#include "flowtt/tile.cuh"

namespace flowtt {

// Calls body with an integral constant 4, 2 or 1, at most MOST: the tallest tiles that leave work for
// some warps: twice as tall a tile reads a third less of shared memory, which is what bounds these products.
template <int MOST, class Body>
__device__ __forceinline__ void with_tile_height(int rows, int columns, const Body& body) {
  if (MOST >= 4 && rows * columns >= 2 * kThreads) {
    body(std::integral_constant<int, MOST >= 4 ? 4 : 1>{});
  } else if (MOST >= 2 && 2 * rows * columns >= kThreads) {
    body(std::integral_constant<int, MOST >= 2 ? 2 : 1>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

// A thread's tile [TM, 4] of a product: rows a[i] of `depth` elements, a multiple of four, times columns b of rows
// `pitch` apart.
template <int TM, class Element>
__device__ __forceinline__ void multiply_tile(float4 (&sum)[TM], const float* const (&a)[TM], const Element* b,
                                              int pitch, int depth) {
#pragma unroll(TM < 4 ? 2 : 1)  // of tall tiles a step keeps enough registers busy
  for (int k = 0; k < depth; k += 4) {
    float4 row[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) row[j] = load4(b + (k + j) * pitch);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const float4 x = load4(a[i] + k);
      fma4(sum[i], x.x, row[0]);
      fma4(sum[i], x.y, row[1]);
      fma4(sum[i], x.z, row[2]);
      fma4(sum[i], x.w, row[3]);
    }
  }
}

// C = left * middle, tiles of TM x 4 a thread.
template <int TM, class Element>
__device__ __forceinline__ void prefix_products(const TableShape& shape, Slab slab, const float* left,
                                                const Element* middle, float* c, int rows) {
  const int quads = shape.rank4 / 4, columns = slab.num_q * quads, groups = (rows + TM - 1) / TM;
  const int left_pitch = shape.left_pitch, slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch;
  const int middle_piece = shape.middle_piece, middle_pitch = shape.middle_pitch, depth = shape.left_rank4;
  for (int item = threadIdx.x; item < groups * columns; item += kThreads) {
    const int group = item / columns, piece = item % columns / quads, column = item % quads * 4;
    const float* a[TM];
#pragma unroll
    for (int i = 0; i < TM; ++i) a[i] = left + min(group + i * groups, rows - 1) * left_pitch;
    float4 sum[TM] = {};
    multiply_tile(sum, a, middle + piece * middle_piece + column, middle_pitch, depth);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int row = group + i * groups;
      // [mutant: overlapping-pieces]
      if (row < rows) store4(c + row * slab_pitch + piece * rank_pitch + column, sum[i]);
    }
  }
}

// The same by the tensor cores, for ranks that are multiples of eight. A warp makes 16 x (8 TILES) of C at a time;
// multiply(sum, upper, lower, pieces) adds to it the product of left factors' rows and columns of the middle slice that
// start at offsets. Reads left factors again where rows are no multiple of 16.
template <int TILES, class Multiply>
__device__ __forceinline__ void prefix_tiles(const TableShape& shape, Slab slab, const float* left, float* c, int rows,
                                             const Multiply& multiply) {
  const int g = threadIdx.x % 32 / 4;
  const int pieces = shape.rank / 8, columns = slab.num_q * pieces;  // in tiles of eight
  const int row_tiles = (rows + 15) / 16, strips = (columns + TILES - 1) / TILES;
  const int left_pitch = shape.left_pitch, slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch;
  const int middle_piece = shape.middle_piece;
  for (int item = threadIdx.x / 32; item < row_tiles * strips; item += kThreads / 32) {
    const int first_row = item / strips * 16, row = first_row + g, first = item % strips * TILES;
    int from[TILES];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int tile = min(first + n, columns - 1);
      from[n] = tile / pieces * middle_piece + tile % pieces * 8;
    }
    float sum[TILES][4] = {};
    multiply(sum, left + min(row, rows - 1) * left_pitch, left + min(row + 8, rows - 1) * left_pitch, from);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const Quad quad = quad_of(sum[n]);
      if (first + n >= columns || first_row + quad.row >= rows) continue;
      store4(c + (first_row + quad.row) * slab_pitch + (first + n) / pieces * rank_pitch + (first + n) % pieces * 8 +
                 quad.column,
             quad.value);
    }
  }
}

// C = left * middle, the best way for the shape; a thread makes at most MOST x 4 at a time, a warp 16 x (8 TILES).
// tf32: whether the accuracy of TF32 is enough.
template <int MOST, int TILES, class Element>
__device__ __forceinline__ void make_products(const DeviceTable& table, Slab slab, bool tf32, const float* left,
                                              const Element* middle, float* c, int rows) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const TableShape shape = table;
  const int depth = shape.left_rank, pitch = shape.middle_pitch;
  if (!shape.tensor_products) {
    with_tile_height<MOST>(rows, slab.num_q * shape.rank4 / 4,
                           [&](auto height) { prefix_products<height.value>(shape, slab, left, middle, c, rows); });
    return;
  }
  if constexpr (!kIsFloat<Element>) {
    if (shape.num_cores == 3 && depth % 16 == 0) {  // left factors are 16-bit numbers, too
      prefix_tiles<TILES>(
          shape, slab, left, c, rows,
          [&](float (&sum)[TILES][4], const float* upper, const float* lower, const int (&from)[TILES]) {
#pragma unroll 1
            for (int k = 0; k < depth; k += 16) {
              const auto pair = [&](const float* row, int i) {
                const float2 x = *reinterpret_cast<const float2*>(row + k + 2 * t + i);
                return pack(static_cast<Element*>(nullptr), x.x, x.y);
              };
              // [mutant: swapped-fragments]
              const uint32_t a[4] = {pair(upper, 0), pair(lower, 0), pair(upper, 8), pair(lower, 8)};
              const Element* const row = middle + (k + lane % 16) * pitch;
#pragma unroll
              for (int n = 0; n < TILES; ++n) {
                uint32_t b[2];
                load_columns(b, row + from[n]);
                multiply_16<Element>(sum[n], a, b);
              }
            }
          });
      return;
    }
  }
  // The left factors of three 16-bit cores, and 16-bit middle slices, are exact in TF32.
  constexpr bool kSplitMiddle = kIsFloat<Element>;
  with_splits<true, kSplitMiddle>(tf32 || (!kSplitMiddle && shape.num_cores == 3), [&](auto split_a, auto split_b) {
    prefix_tiles<TILES>(shape, slab, left, c, rows,
                        [&](float (&sum)[TILES][4], const float* upper, const float* lower, const int (&from)[TILES]) {
                          multiply_add<Depth::kAlongRows, split_a.value, split_b.value>(
                              sum, depth, [&](int half, int k) { return (half == 0 ? upper : lower)[k]; },
                              [&](int n, int k) { return widen(middle[k * pitch + from[n] + g]); });
                        });
  });
}

// E = C * last for the tile's rows [begin, end); rows of the slab's flows, which start with `first_flow`, are in C.
template <int TM, class Element>
__device__ __forceinline__ void row_products(const DeviceTable& table, Slab slab, const Tile& tile, int begin, int end,
                                             int first_flow, const float* c, const Element* last, float* rows_out,
                                             int row_stride) {
  const TableShape shape = table;
  const int quads = shape.last_q4 / 4, height = shape.left_rows * slab.num_q, groups = (height + TM - 1) / TM;
  const int left_rows = shape.left_rows, middle_q = shape.middle_q, last_q = shape.last_q, last_q4 = shape.last_q4;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch, last_pitch = shape.last_pitch;
  const int depth = shape.rank4;
  const bool whole = last_q % 4 == 0 && row_stride % 4 == 0;
  for (int item = threadIdx.x; item < (end - begin) * groups * quads; item += kThreads) {
    const int row = begin + item / (groups * quads), group = item / quads % groups, h = item % quads * 4;
    const float* const product = c + (tile.row_flow[row] - first_flow) * left_rows * slab_pitch;
    const float* a[TM];
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int m = min(group + i * groups, height - 1);
      a[i] = product + m / slab.num_q * slab_pitch + m % slab.num_q * rank_pitch;
    }
    float4 sum[TM] = {};
    multiply_tile(sum, a, last + row * last_pitch + h, last_q4, depth);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int m = group + i * groups;
      if (m >= height) continue;
      const int64_t column = (m / slab.num_q * middle_q + slab.first_q + m % slab.num_q) * last_q + h;
      float* const to = rows_out + int64_t{tile.first + row} * row_stride + column;
      if (whole) {
        store4(to, sum[i]);
      } else {
        const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (h + j < last_q) to[j] = values[j];
        }
      }
    }
  }
}

// The same by the tensor cores, for flows [begin, end): a warp makes 16 rows x 8 columns of all rows of a flow.
template <class Element>
__device__ __forceinline__ void row_products_by_warps(const DeviceTable& table, Slab slab, bool tf32, const Tile& tile,
                                                      int begin, int end, const float* c, const Element* last,
                                                      float* rows_out, int row_stride) {
  const TableShape shape = table;
  const int g = threadIdx.x % 32 / 4, width = shape.last_q, height = shape.left_rows * slab.num_q;
  const int left_rows = shape.left_rows, depth = shape.rank, gap = shape.middle_q - slab.num_q;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch, last_pitch = shape.last_pitch;
  const int slab_magic = shape.slab_magic, last_magic = shape.last_magic;
  const FlowStrips strips(shape, tile, begin, end, height / 16);
  for (int item = threadIdx.x / 32; item < strips.count(); item += kThreads / 32) {
    const FlowStrip at = strips[item];
    const auto product_of = [&](int m) {
      const int left_row = divide(m, slab_magic);
      return c + (at.flow * left_rows + left_row) * slab_pitch + (m - left_row * slab.num_q) * rank_pitch;
    };
    const float* const upper = product_of(at.part * 16 + g);
    const float* const lower = product_of(at.part * 16 + g + 8);
    const int column = min(at.column + g, at.columns - 1), u = divide(column, last_magic);
    const Element* const slice = last + (at.first_row + u) * last_pitch + column - u * width;
    float sum[1][4] = {};
    with_splits<true, kIsFloat<Element>>(tf32, [&](auto split_a, auto split_b) {
      multiply_add<Depth::kAlongRows, split_a.value, split_b.value>(
          sum, depth, [&](int half, int k) { return (half == 0 ? upper : lower)[k]; },
          [&](int, int k) { return widen(slice[k * width]); });
    });
    const Quad quad = quad_of(sum[0]);
    const int to = at.column + quad.column, row_to = divide(to, last_magic);
    if (to >= at.columns) continue;
    const int m = at.part * 16 + quad.row, element = m + divide(m, slab_magic) * gap + slab.first_q;
    store4(rows_out + int64_t{tile.first + at.first_row + row_to} * row_stride + element * width + to - row_to * width,
           quad.value);
  }
}

}  // namespace flowtt
