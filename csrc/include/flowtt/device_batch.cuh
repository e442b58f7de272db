// Reading a batch on the device.
#pragma once

#include "flowtt/device_table.h"
#include "flowtt/platform.cuh"

namespace flowtt {

constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 8;  // a lane works on columns lane, lane + 32, ..., at most this many at a time

// What is wrong with a batch; zeros and, for the positions, the largest number before make_keys.
struct BatchFaults {
  unsigned long long num_invalid;
  unsigned long long first_invalid;  // position of a row number out of range
  unsigned long long first_fall;     // offsets[i + 1] < offsets[i]
  bool failed;                       // the batch cannot be taken
};
constexpr unsigned long long kNowhere = ~0ull;

FLOWTT_INLINE int64_t integer_at(const void* data, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

FLOWTT_INLINE int64_t offset_at(const DeviceBatch& batch, int64_t bag) {
  return integer_at(batch.offsets, batch.wide_offsets, bag);
}

// Number in the plan's wave of a distinct row; -1: it is not in it.
FLOWTT_INLINE int wave_row(const DevicePlan& plan, int row) {
  return row >= plan.begin_row && row - plan.begin_row < plan.counts[0] ? row - plan.begin_row : -1;
}

// Whether the batch has failed, or is empty: its first wave has no rows.
FLOWTT_INLINE bool has_no_rows(const DevicePlan& plan) { return plan.begin_row == 0 && plan.counts[0] == 0; }

struct BagPlace {
  int64_t output;  // first element in the output
  int dim;
};

FLOWTT_INLINE BagPlace bag_place(const DeviceBatch& batch, int bag) {
  const DeviceFeature feature = batch.features[bag / batch.batch_size];
  const int sample = bag % batch.batch_size;
  return {int64_t{sample} * batch.total_dim + feature.column, batch.tables[feature.table].dim};
}

// Factor of one lookup of a bag.
FLOWTT_INLINE float lookup_factor(const DeviceBatch& batch, const Pooling& pooling, int bag, int lookup) {
  const float factor = pooling.factors != nullptr ? pooling.factors[lookup] : 1.f;
  if (!pooling.mean) return factor;
  return factor / static_cast<float>(offset_at(batch, bag + 1) - offset_at(batch, bag));
}

}  // namespace flowtt
