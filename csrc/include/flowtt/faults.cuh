// A batch that the ops cannot take: the kernel says what is wrong and fails, as device assertions do.
#pragma once

#include "flowtt/device_batch.cuh"
#include "flowtt/plan.h"

namespace flowtt {

__global__ void report_faults(DeviceBatch batch, const void* indices, bool wide, BoundsCheckMode mode,
                              const BatchFaults* faults) {
  const int64_t bags = int64_t{batch.num_features} * batch.batch_size;
  const long long begin = offset_at(batch, 0), end = offset_at(batch, bags);
  if (begin != 0 || end != batch.num_lookups) {
    FLOWTT_KERNEL_FAILURE("offsets must start at 0 and end at the number of indices, %d, but go from %lld to %lld\n",
                          batch.num_lookups, begin, end);
  }
  if (faults->first_fall != kNowhere) {
    const long long at = static_cast<long long>(faults->first_fall);
    FLOWTT_KERNEL_FAILURE("offsets must not decrease, but offsets[%lld] = %lld and offsets[%lld] = %lld\n", at,
                          static_cast<long long>(offset_at(batch, at)), at + 1,
                          static_cast<long long>(offset_at(batch, at + 1)));
  }
  if (faults->num_invalid == 0 || mode == BoundsCheckMode::kIgnore) return;
  const long long at = static_cast<long long>(faults->first_invalid);
  int64_t feature = 0;
  while (offset_at(batch, (feature + 1) * batch.batch_size) <= at) ++feature;
  const int table = batch.features[feature].table;
  const long long value = integer_at(indices, wide, at), last = batch.tables[table].num_embeddings - 1;
  if (mode == BoundsCheckMode::kFatal) {
    FLOWTT_KERNEL_FAILURE(
        "index %lld at position %lld (feature %d, table number %d) is out of range; allowed: 0 to %lld\n", value, at,
        static_cast<int>(feature), table, last);
  }
  printf(
      "flowtt: %llu row numbers are out of range and taken as 0, first %lld at position %lld (feature %d, table "
      "number %d); allowed: 0 to %lld\n",
      faults->num_invalid, value, at, static_cast<int>(feature), table, last);
}

}  // namespace flowtt
