// What becomes of core gradients: the fused optimizers, in place, or a plain gradient.
#pragma once

#include "flowtt/bisection.cuh"
#include "flowtt/element.cuh"
#include "flowtt/gradient_sum.cuh"
#include "flowtt/plan.h"

namespace flowtt {

// Marks the slices that the batch's rows use: only they take part in a step.
__global__ void mark_touched(DeviceBatch batch, DevicePlan plan, uint8_t* touched) {
  const int64_t num_rows = plan.counts[0];
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= num_rows) return;
  const int64_t key = plan.row_keys[row];
  const DeviceTable& table = batch.tables[key >> batch.table_shift];
  for (int k = 0; k < table.num_cores; ++k) {
    const int bits = 32 - __clz(table.p[k] - 1);
    const int64_t digit = key >> table.digit_shift[k] & ((int64_t{1} << bits) - 1);
    // All write the same: a volatile store, as nobody reads it before the next kernel.
    *static_cast<volatile uint8_t*>(touched + table.slice_offset[k] + digit) = 1;
  }
}

// What a step is divided by. Where that would be 0, there has been no gradient, and 0 / 1 is no step.
FLOWTT_INLINE float divisor(float squares, float eps) {
  const float root = sqrtf(squares) + eps;
  return root == 0.f ? 1.f : root;
}

constexpr size_t update_shared_bytes() { return kThreads / 32 * sizeof(float) + kRedZone; }

// One step on every touched slice, a block a slice.
template <class Element, class Sum>
__global__ void __launch_bounds__(kThreads)
    update_slices(DeviceBatch batch, const uint8_t* touched, int64_t num_slices, Sum gradients,
                  const UpdateRule<float>* rules, Element* weights, float* momentum1, float* momentum2) {
  FLOWTT_DYNAMIC_SHARED(raw);
  float* const sums = shared_array<float>(raw, 0, kThreads / 32);
  for (int64_t slice = blockIdx.x; slice < num_slices; slice += gridDim.x) {
    if (touched[slice] == 0) continue;  // uniform
    const int number = last_where(batch.num_tables, [&](int i) { return batch.tables[i].slice_offset[0] <= slice; });
    const DeviceTable& table = batch.tables[number];
    const UpdateRule<float> rule = rules[number];
    const Rounding rounding{rule.rounding_seed};
    int core = table.num_cores - 1;
    while (table.slice_offset[core] > slice) --core;
    const int size = table.slice_size[core];
    const int64_t begin = table.core_offset[core] + (slice - table.slice_offset[core]) * size;

    float rate = rule.learning_rate;
    if (rule.optimizer == Optimizer::kRowwiseAdagrad) {
      float sum = 0.f;
      for (int64_t i = begin + threadIdx.x; i < begin + size; i += kThreads) {
        const float gradient = gradients.get(i) + rule.weight_decay * widen(weights[i]);
        sum += gradient * gradient;
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      __syncthreads();  // the last slice's sums have been read
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
      __syncthreads();
      sum = 0.f;
      for (int warp = 0; warp < kThreads / 32; ++warp) sum += sums[warp];
      const float moment = momentum1[slice] + sum / static_cast<float>(size);
      __syncthreads();  // everybody has read the momentum [mutant: early-momentum]
      if (threadIdx.x == 0) momentum1[slice] = moment;
      rate /= divisor(moment, rule.eps);
    }
    for (int64_t i = begin + threadIdx.x; i < begin + size; i += kThreads) {
      const float weight = widen(weights[i]);
      if (rule.optimizer == Optimizer::kAdam) {
        const float plain = gradients.get(i);
        const float first = rule.beta1 * momentum1[i] + (1.f - rule.beta1) * plain;
        const float second = rule.beta2 * momentum2[i] + (1.f - rule.beta2) * plain * plain;
        momentum1[i] = first;
        momentum2[i] = second;
        const float step = first / rule.correction1 / divisor(second / rule.correction2, rule.eps);
        rounding.store(weights + i, i, weight - rule.learning_rate * (step + rule.weight_decay * weight));
        continue;
      }
      const float gradient = gradients.get(i) + rule.weight_decay * weight;
      if (rule.optimizer == Optimizer::kAdagrad) {
        const float moment = momentum1[i] + gradient * gradient;
        momentum1[i] = moment;
        rounding.store(weights + i, i, weight - rule.learning_rate * gradient / divisor(moment, rule.eps));
      } else {
        rounding.store(weights + i, i, weight - rate * gradient);
      }
    }
  }
}

}  // namespace flowtt
