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
#pragma unroll 2
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
