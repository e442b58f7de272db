// Products of small matrices in shared memory, by all threads of a block. A thread makes tiles of TM x 4 of the result;
// every operand comes as float4. Shapes and pitches: device_table.h.
#pragma once

#include "flowtt/tile.cuh"

namespace flowtt {

// A slab of the middle slice: `num_q` of its columns of `rank`, from `first_q` on.
struct Slab {
  int first_q, num_q;
};

// Calls body with an integral constant 4, 2 or 1, at most MOST: the tallest tiles that leave work for every thread.
template <int MOST, class Body>
__device__ __forceinline__ void with_tile_height(int rows, int columns, const Body& body) {
  if (MOST >= 4 && rows * columns >= 4 * kThreads) {
    body(std::integral_constant<int, MOST >= 4 ? 4 : 1>{});
  } else if (MOST >= 2 && rows * columns >= 2 * kThreads) {
    body(std::integral_constant<int, MOST >= 2 ? 2 : 1>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

// C = left * owner.
template <int TM>
__device__ __forceinline__ void prefix_products(const DeviceTable& table, Slab slab, const float* left,
                                                const float* owner, float* c, int rows) {
  const int quads = table.rank4 / 4, columns = slab.num_q * quads, groups = (rows + TM - 1) / TM;
  for (int item = threadIdx.x; item < groups * columns; item += kThreads) {
    const int group = item / columns, quad = item % columns;
    const int column = quad / quads * table.rank_pitch + quad % quads * 4;
    const float* a[TM];
#pragma unroll
    for (int i = 0; i < TM; ++i) a[i] = left + min(group + i * groups, rows - 1) * table.left_pitch;
    float4 sum[TM] = {};
#pragma unroll 2
    for (int k = 0; k < table.left_rank4; k += 4) {
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = load4(owner + (k + j) * table.slab_pitch + column);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        const float4 x = load4(a[i] + k);
        fma4(sum[i], x.x, b[0]);
        fma4(sum[i], x.y, b[1]);
        fma4(sum[i], x.z, b[2]);
        fma4(sum[i], x.w, b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int row = group + i * groups;
      if (row < rows) store4(c + row * table.slab_pitch + column, sum[i]);
    }
  }
}

// x as the sum of two TF32 numbers.
FLOWTT_INLINE void split_tf32(float x, float& high, float& low) {
  high = to_tf32(x);
  low = to_tf32(x - high);
}

// The same by the tensor cores, with FP32's accuracy: an operand is the sum of two TF32 numbers, and of the four
// products the smallest is dropped. A warp makes 16 x (8 TILES) of C at a time. For ranks that are multiples of eight;
// reads left factors again where rows are no multiple of 16.
template <int TILES>
__device__ __forceinline__ void prefix_products_tf32(const DeviceTable& table, Slab slab, const float* left,
                                                     const float* owner, float* c, int rows) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int pieces = table.rank / 8, columns = slab.num_q * pieces;  // in tiles of eight
  const int row_tiles = (rows + 15) / 16, strips = (columns + TILES - 1) / TILES;
  for (int item = threadIdx.x / 32; item < row_tiles * strips; item += kThreads / 32) {
    const int row = item / strips * 16 + g, first = item % strips * TILES;
    const float* const upper = left + min(row, rows - 1) * table.left_pitch;
    const float* const lower = left + min(row + 8, rows - 1) * table.left_pitch;
    int column[TILES];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int tile = min(first + n, columns - 1);
      column[n] = tile / pieces * table.rank_pitch + tile % pieces * 8;
    }
    float sum[TILES][4] = {};
#pragma unroll 1
    for (int k = 0; k < table.left_rank; k += 8) {
      float a[4], a_low[4];
      split_tf32(upper[k + t], a[0], a_low[0]);
      split_tf32(lower[k + t], a[1], a_low[1]);
      split_tf32(upper[k + t + 4], a[2], a_low[2]);
      split_tf32(lower[k + t + 4], a[3], a_low[3]);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float* const from = owner + (k + t) * table.slab_pitch + column[n] + g;
        float b[2], b_low[2];
        split_tf32(from[0], b[0], b_low[0]);
        split_tf32(from[4 * table.slab_pitch], b[1], b_low[1]);
        multiply_tf32(sum[n], a_low, b);
        multiply_tf32(sum[n], a, b_low);
        multiply_tf32(sum[n], a, b);
      }
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      if (first + n >= columns) continue;
      float* const to = c + row * table.slab_pitch + column[n] + 2 * t;
      if (row < rows) *reinterpret_cast<float2*>(to) = make_float2(sum[n][0], sum[n][1]);
      if (row + 8 < rows) {
        *reinterpret_cast<float2*>(to + 8 * table.slab_pitch) = make_float2(sum[n][2], sum[n][3]);
      }
    }
  }
}

// C = left * owner, the best way for the shape; a thread makes at most MOST x 4 at a time, a warp 16 x (8 TILES).
template <int MOST, int TILES>
__device__ __forceinline__ void make_products(const DeviceTable& table, Slab slab, const float* left,
                                              const float* owner, float* c, int rows) {
  if (table.tensor_cores) {
    prefix_products_tf32<TILES>(table, slab, left, owner, c, rows);
  } else {
    with_tile_height<MOST>(rows, slab.num_q * table.rank4 / 4,
                           [&](auto height) { prefix_products<height.value>(table, slab, left, owner, c, rows); });
  }
}

// E = C * last for the tile's rows [begin, end); rows of the slab's flows, which start with `first_flow`, are in C.
template <int TM>
__device__ __forceinline__ void row_products(const DeviceTable& table, Slab slab, const Tile& tile, int begin, int end,
                                             int first_flow, const float* c, const float* last, float* rows_out,
                                             int row_stride) {
  const int quads = table.last_q4 / 4, height = table.left_rows * slab.num_q, groups = (height + TM - 1) / TM;
  const bool whole = table.last_q % 4 == 0 && row_stride % 4 == 0;
  for (int item = threadIdx.x; item < (end - begin) * groups * quads; item += kThreads) {
    const int row = begin + item / (groups * quads), group = item / quads % groups, h = item % quads * 4;
    const float* const d = last + row * table.last_pitch + h;
    const float* const product = c + (tile.row_flow[row] - first_flow) * table.left_rows * table.slab_pitch;
    const float* a[TM];
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int m = min(group + i * groups, height - 1);
      a[i] = product + m / slab.num_q * table.slab_pitch + m % slab.num_q * table.rank_pitch;
    }
    float4 sum[TM] = {};
#pragma unroll(TM < 4 ? 2 : 1)  // registers
    for (int k = 0; k < table.rank4; k += 4) {
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = load4(d + (k + j) * table.last_q4);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        const float4 x = load4(a[i] + k);
        fma4(sum[i], x.x, b[0]);
        fma4(sum[i], x.y, b[1]);
        fma4(sum[i], x.z, b[2]);
        fma4(sum[i], x.w, b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int m = group + i * groups;
      if (m >= height) continue;
      const int64_t column = (m / slab.num_q * table.owner_q + slab.first_q + m % slab.num_q) * table.last_q + h;
      float* const to = rows_out + int64_t{tile.first + row} * row_stride + column;
      if (whole) {
        store4(to, sum[i]);
      } else {
        const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (h + j < table.last_q) to[j] = values[j];
        }
      }
    }
  }
}

}  // namespace flowtt
