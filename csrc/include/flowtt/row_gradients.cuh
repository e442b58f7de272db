// From bags back to distinct rows, and to per-sample weights.
#pragma once

#include "flowtt/device_batch.cuh"

namespace flowtt {

// Gradient of every per-sample weight, a warp a lookup.
__global__ void factor_gradients(DeviceBatch batch, DevicePlan plan, Pooling pooling, const int32_t* row_of_lookup,
                                 const float* rows, int row_stride, const float* grad_output, float* gradients) {
  const int lookup = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lookup >= batch.num_lookups) return;  // the whole warp
  const int bag = plan.bags[lookup], number = wave_row(plan, row_of_lookup[lookup]);
  if (has_no_rows(plan) && lane == 0) gradients[lookup] = 0.f;
  if (number < 0) return;
  const BagPlace place = bag_place(batch, bag);
  const float* const row = rows + int64_t{number} * row_stride;
  float sum = 0.f;
  for (int column = lane; column < place.dim; column += 32) sum += row[column] * grad_output[place.output + column];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (lane == 0) gradients[lookup] = sum * lookup_factor(batch, {nullptr, pooling.mean}, bag, lookup);
}

// Gradients of rows: sums over the lookups of each, in key order and without atomics, hence the same bits every time.
//
// A warp takes a span of 32 places of the sorted order. The part of a row that began in an earlier span goes to
// carries[span]. 32 carries of one row become one of the next level, so that a hot row's are not added one by one; then
// add_carries adds what is left, in order, to the sum of the span in which the row begins.
struct RowGradientArguments {
  DeviceBatch batch;
  DevicePlan plan;
  Pooling pooling;
  const int32_t* row_of_lookup;
  const float* grad_output;
  float* row_gradients;  // [rows of the wave, row_stride]
  float* carries;        // [spans, row_stride]
  int row_stride;
};

__global__ void sum_row_gradients(const __grid_constant__ RowGradientArguments p) {
  const int span = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, first = span * 32;
  if (first >= p.batch.num_lookups) return;  // the whole warp
  const int count = min(32, p.batch.num_lookups - first);
  const int lookup = p.plan.lookups[first + min(lane, count - 1)];
  const int bag = p.plan.bags[lookup];
  const BagPlace place = bag_place(p.batch, bag);
  const float factor = lookup_factor(p.batch, p.pooling, bag, lookup);
  const int row = p.row_of_lookup[lookup];
  if (__ballot_sync(0xffffffffu, wave_row(p.plan, row) >= 0) == 0) return;
  const bool carried = p.plan.row_starts[__shfl_sync(0xffffffffu, row, 0)] < first;

  int most = place.dim;
  for (int lanes = 16; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  for (int base = lane; base - lane < most; base += 32 * kColumns) {
    float sum[kColumns] = {};
    bool to_carry = carried;
    for (int j = 0; j < count; ++j) {
      const int row_j = __shfl_sync(0xffffffffu, row, j), next_row = __shfl_sync(0xffffffffu, row, min(j + 1, 31));
      const int dim_j = __shfl_sync(0xffffffffu, place.dim, j);
      const float factor_j = __shfl_sync(0xffffffffu, factor, j);
      const int64_t output_j = __shfl_sync(0xffffffffu, place.output, j);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (base + 32 * i < dim_j) sum[i] += factor_j * p.grad_output[output_j + base + 32 * i];
      }
      if (j + 1 < count && next_row == row_j) continue;
      const int number = wave_row(p.plan, row_j);
      float* const to =
          to_carry ? p.carries + int64_t{span} * p.row_stride : p.row_gradients + int64_t{number} * p.row_stride;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (number >= 0 && base + 32 * i < dim_j) to[base + 32 * i] = sum[i];
        sum[i] = 0.f;
      }
      to_carry = false;
    }
  }
}

// Where 32 stretches of `stride` spans all carry one row: their sum, in place of the first one's.
__global__ void sum_carries(const __grid_constant__ RowGradientArguments p, int stride) {
  const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * 32 * stride, last = first + 32 * stride - 1;
  if (last * 32 >= p.batch.num_lookups) return;
  const int lookup = p.plan.lookups[first * 32], row = p.row_of_lookup[lookup];
  if (wave_row(p.plan, row) < 0) return;
  if (p.plan.row_starts[row] >= first * 32 || p.plan.row_starts[row + 1] <= last * 32) return;
  const int dim = bag_place(p.batch, p.plan.bags[lookup]).dim;
  for (int column = threadIdx.x % 32; column < dim; column += 32) {
    float* const carries = p.carries + first * p.row_stride + column;
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) sum += carries[int64_t{i} * stride * p.row_stride];
    *carries = sum;
  }
}

__global__ void add_carries(const __grid_constant__ RowGradientArguments p) {
  const int span = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, end = span * 32 + 32;
  if (end >= p.batch.num_lookups) return;
  const int lookup = p.plan.lookups[end - 1];
  const int row = p.row_of_lookup[lookup], number = wave_row(p.plan, row);
  if (number < 0) return;
  // Nothing to do unless the row of this span's last place begins here and goes on behind it.
  if (p.plan.row_starts[row] < span * 32 || p.plan.row_starts[row + 1] <= end) return;
  const int last_span = (p.plan.row_starts[row + 1] - 1) / 32;
  const int dim = bag_place(p.batch, p.plan.bags[lookup]).dim;
  for (int column = lane; column < dim; column += 32) {
    float* const to = p.row_gradients + int64_t{number} * p.row_stride + column;
    float sum = *to;
    for (int s = span + 1, step; s <= last_span; s += step) {
      for (step = 1; s % (32 * step) == 0 && s + 32 * step - 1 <= last_span;) step *= 32;
      sum += p.carries[int64_t{s} * p.row_stride + column];
      if (column == 0) FLOWTT_COUNT("carries added one by one", 1);
    }
    *to = sum;
  }
}

}  // namespace flowtt
