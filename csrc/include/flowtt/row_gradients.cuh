// From bags back to distinct rows, and to per-sample weights.
#pragma once

#include "flowtt/device_batch.cuh"

namespace flowtt {

// Gradients of rows: sums over the lookups of each, in key order and without atomics, hence the same bits every time.
//
// A warp takes a span of 32 places of the sorted order. The part of a row that began in an earlier span goes to
// carries[span]. 32 carries of one row become one of the next level, so that a hot row's are not added one by one; then
// add_carries adds what is left, in order, to the sum of the span in which the row begins. No lookup's row is looked
// up: the order has the rows.
struct RowGradientArguments {
  DeviceBatch batch;
  DevicePlan plan;
  Pooling pooling;
  const int32_t* span_rows;  // [spans + 1]: distinct row of a span's first place; at the end their number
  const float* grad_output;
  float* row_gradients;  // [rows of the wave, row_stride]
  float* carries;        // [spans, row_stride]
  int row_stride;
};

__global__ void find_span_rows(DevicePlan plan, int num_lookups, int32_t* span_rows) {
  const int span = blockIdx.x * kThreads + threadIdx.x, spans = (num_lookups + 31) / 32;
  if (span > spans) return;
  const int num_rows = static_cast<int>(plan.counts[0]);
  span_rows[span] = span < spans ? row_at(plan, num_rows, span * 32) : num_rows;
}

// What a lane knows of its place in a span.
struct SpanLane {
  int lookup, bag, row;
  BagPlace place;

  // count: places of the span.
  __device__ __forceinline__ SpanLane(const RowGradientArguments& p, int span, int count)
      : lookup(p.plan.lookups[span * 32 + min(static_cast<int>(threadIdx.x % 32), count - 1)]),
        bag(p.plan.bags[lookup]),
        row(row_of_lane(p.plan, span * 32, p.span_rows[span], p.span_rows[span + 1])),
        place(bag_place(p.batch, bag)) {}
};

__global__ void sum_row_gradients(const __grid_constant__ RowGradientArguments p) {
  const int span = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, first = span * 32;
  if (first >= p.batch.num_lookups) return;  // the whole warp
  const WaveRows wave(p.plan);
  if (!wave.meets(p.span_rows[span], p.span_rows[span + 1])) return;
  const int count = min(32, p.batch.num_lookups - first);
  const SpanLane mine(p, span, count);
  const float factor = lookup_factor(p.batch, p.pooling, mine.bag, mine.lookup);
  const bool carried = p.plan.row_starts[p.span_rows[span]] < first;

  int most = mine.place.dim;
  for (int lanes = 16; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  for (int base = lane; base - lane < most; base += 32 * kColumns) {
    float sum[kColumns] = {};
    bool to_carry = carried;  // [mutant: uncarried-row]
    for (int j = 0; j < count; ++j) {
      const int row_j = __shfl_sync(0xffffffffu, mine.row, j);
      const int next_row = __shfl_sync(0xffffffffu, mine.row, min(j + 1, 31));
      const int dim_j = __shfl_sync(0xffffffffu, mine.place.dim, j);
      const float factor_j = __shfl_sync(0xffffffffu, factor, j);
      const int64_t output_j = __shfl_sync(0xffffffffu, mine.place.output, j);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (base + 32 * i < dim_j) sum[i] += factor_j * p.grad_output[output_j + base + 32 * i];
      }
      if (j + 1 < count && next_row == row_j) continue;
      const int number = wave(row_j);
      float* const to =
          // [mutant: misdirected-carry]
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

// Elements of a row of the wave.
FLOWTT_INLINE int row_dim(const RowGradientArguments& p, int number) {
  return p.batch.tables[p.plan.row_keys[number] >> p.batch.table_shift].dim;
}

// Where 32 stretches of `stride` spans all carry one row: their sum, in place of the first one's.
__global__ void sum_carries(const __grid_constant__ RowGradientArguments p, int stride) {
  const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * 32 * stride, last = first + 32 * stride - 1;
  if (last * 32 >= p.batch.num_lookups) return;
  const int row = p.span_rows[first], number = WaveRows(p.plan)(row);
  if (number < 0) return;
  // [mutant: carries-past-row]
  if (p.plan.row_starts[row] >= first * 32 || p.plan.row_starts[row + 1] <= last * 32) return;
  const int dim = row_dim(p, number);
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
  const int row = p.span_rows[span + 1], number = WaveRows(p.plan)(row);
  if (number < 0) return;
  // Nothing to do unless the row of the place behind this span begins in it.
  const int start = p.plan.row_starts[row];
  if (start < span * 32 || start >= end) return;
  const int last_span = (p.plan.row_starts[row + 1] - 1) / 32, dim = row_dim(p, number);
  for (int column = lane; column < dim; column += 32) {
    float* const to = p.row_gradients + int64_t{number} * p.row_stride + column;
    float sum = *to;
    for (int s = span + 1, step; s <= last_span; s += step) {  // [mutant: dropped-carry]
      for (step = 1; s % (32 * step) == 0 && s + 32 * step - 1 <= last_span;) step *= 32;
      sum += p.carries[int64_t{s} * p.row_stride + column];
      if (column == 0) FLOWTT_COUNT("carries added one by one", 1);
    }
    *to = sum;
  }
}

// Gradients of the per-sample weights, a warp a span; `rows` are those of the wave.
__global__ void factor_gradients(const __grid_constant__ RowGradientArguments p, const float* rows, float* gradients) {
  const int span = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (span * 32 >= p.batch.num_lookups) return;  // the whole warp
  const int count = min(32, p.batch.num_lookups - span * 32);
  // [mutant: unwritten-gradients]
  if (has_no_rows(p.plan) && lane < count) gradients[p.plan.lookups[span * 32 + lane]] = 0.f;
  const WaveRows wave(p.plan);
  if (!wave.meets(p.span_rows[span], p.span_rows[span + 1])) return;
  const SpanLane mine(p, span, count);
  const int number = wave(mine.row);
  float gradient = 0.f;
  for (int j = 0; j < count; ++j) {
    const int number_j = __shfl_sync(0xffffffffu, number, j);
    const int dim_j = __shfl_sync(0xffffffffu, mine.place.dim, j);
    const int64_t output_j = __shfl_sync(0xffffffffu, mine.place.output, j);
    const float* const row = rows + int64_t{number_j} * p.row_stride;
    float sum = 0.f;
    for (int column = lane; number_j >= 0 && column < dim_j; column += 32) {
      sum += row[column] * p.grad_output[output_j + column];
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == j) gradient = sum;
  }
  if (lane < count && number >= 0) {
    gradients[mine.lookup] = gradient * lookup_factor(p.batch, {nullptr, p.pooling.mean}, mine.bag, mine.lookup);
  }
}

}  // namespace flowtt
