// The units in which FixedSum counts.
#pragma once

#include "flowtt/element.cuh"
#include "flowtt/gradient_sum.cuh"

namespace flowtt {

// The largest magnitude, as the bits of a float: they order as the numbers do, and NaN above all.
template <class Element>
__global__ void largest_weight(const Element* weights, int64_t count, unsigned* largest) {
  unsigned most = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    most = max(most, static_cast<unsigned>(__float_as_int(fabsf(widen(weights[i])))));
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  if (threadIdx.x % 32 == 0) atomicMax(largest, most);
}

__global__ void largest_row_gradient(DeviceBatch batch, DevicePlan plan, const float* row_gradients, int row_stride,
                                     unsigned* largest) {
  unsigned most = 0;
  const int num_rows = static_cast<int>(plan.counts[0]), lane = threadIdx.x % 32;
  for (int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < num_rows; row += gridDim.x * (kThreads / 32)) {
    const int dim = batch.tables[plan.row_keys[row] >> batch.table_shift].dim;
    for (int column = lane; column < dim; column += 32) {
      const float value = row_gradients[int64_t{row} * row_stride + column];
      most = max(most, static_cast<unsigned>(__float_as_int(fabsf(value))));
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  if (lane == 0) atomicMax(largest, most);
}

// A core's gradient is a sum over rows, and for each over at most 2^path_bits paths through the other cores, of
// products of num_factors weights and one element of the row's gradient. largest: of weights and row gradients.
__global__ void choose_scale(const unsigned* largest, DevicePlan plan, int path_bits, int num_factors, float* scale) {
  const auto exponent = [](unsigned bits) { return static_cast<int>(bits >> 23) - 126; };  // value < 2^exponent
  constexpr unsigned kInfinity = 0x7f800000u;
  if (largest[0] >= kInfinity || largest[1] >= kInfinity) {
    scale[0] = scale[1] = __int_as_float(0x7fc00000);
    return;
  }
  const int row_bits = 32 - __clz(static_cast<int>(plan.counts[0]));
  const int most = row_bits + path_bits + num_factors * exponent(largest[0]) + exponent(largest[1]);
  const int units = min(126, max(-126, 62 - most));  // [mutant: overflow]
  scale[0] = __int_as_float((units + 127) << 23);
  scale[1] = __int_as_float((127 - units) << 23);
}

__global__ void to_floats(FixedSum sum, int64_t count, float* gradients) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    gradients[i] = sum.get(i);
  }
}

}  // namespace flowtt
