// The products of backward.cuh on the tensor cores, for the shapes that device_table.h marks: a warp makes 16 x 8 of a
// result, or a few such tiles side by side.
#pragma once

#include "flowtt/gradient_sum.cuh"
#include "flowtt/tensor_cores.cuh"
#include "flowtt/tile.cuh"

namespace flowtt {

// dlast = C^T dE of flows [begin, end). The columns of a product are those of all rows of a flow.
template <class Sum>
__device__ __forceinline__ void last_gradients_by_warps(const DeviceTable& table, Slab slab, bool tf32,
                                                        const Tile& tile, int begin, int end, const float* c,
                                                        const float* row, const Sum& gradients) {
  const TableShape shape = table;
  const int g = threadIdx.x % 32 / 4, width = shape.last_q, gap = shape.middle_q - slab.num_q;
  const int slab_magic = shape.slab_magic, last_magic = shape.last_magic;
  const int rank_pitch = shape.rank_pitch, between = shape.slab_pitch - slab.num_q * rank_pitch;
  const int flow_pitch = shape.left_rows * shape.slab_pitch, row_pitch = shape.row_pitch;
  const int depth = shape.left_rows * slab.num_q;
  const FlowStrips strips(table, tile, begin, end, shape.rank / 16);
  for (int item = threadIdx.x / 32; item < strips.count(); item += kThreads / 32) {
    const FlowStrip at = strips[item];
    const int m = at.part * 16, column = min(at.column + g, at.columns - 1), u = divide(column, last_magic);
    const float* const product = c + at.flow * flow_pitch + m + g;
    const float* const gradient = row + (at.first_row + u) * row_pitch + slab.first_q * width + column - u * width;
    float sum[1][4] = {};
    with_splits<true, true>(tf32, [&](auto split_a, auto split_b) {
      multiply_add<Depth::kOverRows, split_a.value, split_b.value>(
          sum, depth,
          [&](int half, int k) { return product[k * rank_pitch + divide(k, slab_magic) * between + 8 * half]; },
          [&](int, int k) { return gradient[(k + divide(k, slab_magic) * gap) * width]; });
    });
    const Quad quad = quad_of(sum[0]);
    const int to = at.column + quad.column, row_to = divide(to, last_magic);
    if (to >= at.columns) continue;
    gradients.add4(tile.row_last[at.first_row + row_to] + (m + quad.row) * width + to - row_to * width, quad.value);
  }
}

// dC = sum over the flow's rows in this tile of dE last^T, in place of C: one product whose depth runs over all of
// them.
template <class Element>
__device__ __forceinline__ void product_gradients_by_warps(const DeviceTable& table, Slab slab, bool tf32,
                                                           const Tile& tile, int begin, int end, float* c,
                                                           const Element* last, const float* row) {
  constexpr int kTiles = 2;
  const TableShape shape = table;
  const int g = threadIdx.x % 32 / 4, width = shape.last_q, height = shape.left_rows * slab.num_q;
  const int left_rows = shape.left_rows, rank = shape.rank, gap = shape.middle_q - slab.num_q;
  const int slab_magic = shape.slab_magic, last_magic = shape.last_magic;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch;
  const int row_pitch = shape.row_pitch, last_pitch = shape.last_pitch;
  const int row_tiles = (height + 15) / 16, strips = (rank / 8 + kTiles - 1) / kTiles;
  for (int item = threadIdx.x / 32; item < (end - begin) * row_tiles * strips; item += kThreads / 32) {
    const int flow = item / (row_tiles * strips), m = item / strips % row_tiles * 16,
              column = item % strips * kTiles * 8;
    const int first_row = tile.flow_first[begin + flow];
    const int depth = (tile.flow_first[begin + flow + 1] - first_row) * width;
    const auto gradient_of = [&](int i) {
      const int at = min(m + i, height - 1);
      return row + first_row * row_pitch + (at + divide(at, slab_magic) * gap + slab.first_q) * width;
    };
    const float* const upper = gradient_of(g);
    const float* const lower = gradient_of(g + 8);
    const Element* const slices = last + first_row * last_pitch;
    float sum[kTiles][4] = {};
    with_splits<true, kIsFloat<Element>>(tf32, [&](auto split_a, auto split_b) {
      multiply_add<Depth::kAlongRows, split_a.value, split_b.value>(
          sum, (depth + 7) / 8 * 8,
          [&](int half, int k) {
            const int u = divide(k, last_magic);
            // [mutant: gradient-past-flow]
            return k < depth ? (half == 0 ? upper : lower)[u * row_pitch + k - u * width] : 0.f;
          },
          [&](int n, int k) {
            const int u = divide(k, last_magic), r = min(column + 8 * n, rank - 8) + g;
            return k < depth ? widen(slices[u * last_pitch + r * width + k - u * width]) : 0.f;
          });
    });
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Quad quad = quad_of(sum[n]);
      const int at = m + quad.row, left_row = divide(at, slab_magic), r = column + 8 * n + quad.column;
      if (at >= height || r >= rank) continue;
      store4(c + (flow * left_rows + left_row) * slab_pitch + (at - left_row * slab.num_q) * rank_pitch + r,
             quad.value);
    }
  }
}

// dleft = dC middle^T, four at a time given to put(row of the stacked left factors, column, values).
template <int TILES, class Element, class Put>
__device__ __forceinline__ void left_gradients_by_warps(const DeviceTable& table, Slab slab, bool tf32, const float* c,
                                                        const Element* middle, int rows, const Put& put) {
  const int g = threadIdx.x % 32 / 4, row_tiles = (rows + 15) / 16;
  const TableShape shape = table;
  const int left_rank = shape.left_rank, rank = shape.rank;
  const int slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch;
  const int middle_pitch = shape.middle_pitch, middle_piece = shape.middle_piece;
  const int strips = (left_rank / 8 + TILES - 1) / TILES;
  for (int item = threadIdx.x / 32; item < row_tiles * strips; item += kThreads / 32) {
    const int row = item / strips * 16, column = item % strips * TILES * 8;
    const float* const upper = c + min(row + g, rows - 1) * slab_pitch;
    const float* const lower = c + min(row + g + 8, rows - 1) * slab_pitch;
    float sum[TILES][4] = {};
    with_splits<true, kIsFloat<Element>>(tf32, [&](auto split_a, auto split_b) {
#pragma unroll 1
      for (int j = 0; j < slab.num_q; ++j) {
        multiply_add<Depth::kAlongRows, split_a.value, split_b.value>(
            sum, rank, [&](int half, int k) { return (half == 0 ? upper : lower)[j * rank_pitch + k]; },
            [&](int n, int k) {
              const int l = min(column + 8 * n, left_rank - 8) + g;
              return widen(middle[l * middle_pitch + j * middle_piece + k]);
            });
      }
    });
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const Quad quad = quad_of(sum[n]);
      const int l = column + 8 * n + quad.column;
      if (row + quad.row < rows && l < left_rank) put(row + quad.row, l, quad.value);
    }
  }
}

// Where a warp's tiles of the middle slice's gradient [left_rank, slab_q * rank] are: kGradientStrip side by side.
struct GradientStrip {
  bool valid;
  int row, column;  // first, column in tiles of eight

  __device__ __forceinline__ GradientStrip(const TableShape& table, Slab slab, int number) {
    const int strips = (slab.num_q * table.rank / 8 + kGradientStrip - 1) / kGradientStrip;
    const int item = threadIdx.x / 32 + number * (kThreads / 32);
    valid = item < table.left_rank / 16 * strips;
    row = item / strips * 16;
    column = item % strips * kGradientStrip;
  }
};

// sum += left^T dC of one strip. kSplitLeft: whether left factors are not exact in TF32.
template <bool kSplitLeft>
__device__ __forceinline__ void add_middle_gradients(const TableShape& shape, Slab slab, bool tf32,
                                                     const GradientStrip& strip, const float* left, const float* c,
                                                     int rows, float (&sum)[kGradientStrip][4]) {
  const int g = threadIdx.x % 32 / 4, pieces = shape.rank / 8, columns = slab.num_q * pieces;
  const int left_pitch = shape.left_pitch, slab_pitch = shape.slab_pitch, rank_pitch = shape.rank_pitch;
  int from[kGradientStrip];
#pragma unroll
  for (int n = 0; n < kGradientStrip; ++n) {
    const int column = min(strip.column + n, columns - 1);
    from[n] = column / pieces * rank_pitch + column % pieces * 8 + g;
  }
  with_splits<kSplitLeft, true>(tf32, [&](auto split_a, auto split_b) {
    multiply_add<Depth::kOverRows, split_a.value, split_b.value>(
        sum, (rows + 7) / 8 * 8,
        [&](int half, int k) { return k < rows ? left[k * left_pitch + strip.row + 8 * half + g] : 0.f; },
        [&](int n, int k) { return k < rows ? c[k * slab_pitch + from[n]] : 0.f; });
  });
}

}  // namespace flowtt
