// Reading a batch on the device.
#pragma once

#include "flowtt/bisection.cuh"
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

// The distinct rows of a plan's wave, read once.
class WaveRows {
 public:
  FLOWTT_INLINE explicit WaveRows(const DevicePlan& plan)
      : begin_(plan.begin_row), count_(static_cast<int>(plan.counts[0])) {}
  // Number in the wave of a distinct row; -1: it is not in it.
  // [mutant: wave-past-end]
  FLOWTT_INLINE int operator()(int row) const { return row >= begin_ && row - begin_ < count_ ? row - begin_ : -1; }
  // Whether it has any of the rows first ... last.
  FLOWTT_INLINE bool meets(int first, int last) const { return first - begin_ < count_ && last >= begin_; }

 private:
  int begin_, count_;
};

// The last of `num_rows` distinct rows that starts at or before a place in the sorted order.
FLOWTT_INLINE int row_at(const DevicePlan& plan, int num_rows, int place) {
  return last_where(num_rows, [&](int row) { return plan.row_starts[row] <= place; });
}

// Distinct rows of 32 places from `first` on, a lane a place: `row` is that of the first one, `limit` at least that of
// the place after them.
FLOWTT_INLINE int row_of_lane(const DevicePlan& plan, int first, int row, int limit) {
  const int lane = threadIdx.x % 32, next = row + 1 + lane;
  const int start = next <= limit ? plan.row_starts[next] - first : 32;
  unsigned starts = start < 32 ? 1u << start : 0u;
  for (int lanes = 16; lanes > 0; lanes /= 2) starts |= __shfl_xor_sync(0xffffffffu, starts, lanes);
  return row + __popc(starts & (0xffffffffu >> (31 - lane)));  // [mutant: lookup-too-early]
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
