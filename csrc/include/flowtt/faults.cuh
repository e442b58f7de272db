// A batch that the ops cannot take: told to the host, which makes an error of it in a later call, and not worked on.
#pragma once

#include "flowtt/batch_error.h"
#include "flowtt/device_batch.cuh"
#include "flowtt/plan.h"

namespace flowtt {

// In host memory that the device can write.
struct FaultRecord {
  enum State : unsigned { kFree, kClaimed, kWritten };
  unsigned state;
  BatchError error;
  const void* table_names;
};

__device__ __forceinline__ bool find_error(const DeviceBatch& batch, const void* indices, bool wide,
                                           BoundsCheckMode mode, const BatchFaults& faults, BatchError& error) {
  const int64_t begin = offset_at(batch, 0), end = offset_at(batch, int64_t{batch.num_features} * batch.batch_size);
  if (begin != 0 || end != batch.num_lookups) {
    error = {BatchError::kWrongEnds, 0, 0, 0, begin, end, batch.num_lookups};
    return true;
  }
  if (faults.first_fall != kNowhere) {
    const auto at = static_cast<int64_t>(faults.first_fall);
    error = {BatchError::kFall, 0, 0, at, offset_at(batch, at), offset_at(batch, at + 1), 0};
    return true;
  }
  if (faults.num_invalid == 0 || mode != BoundsCheckMode::kFatal) return false;
  const auto at = static_cast<int64_t>(faults.first_invalid);
  int feature = 0;
  while (offset_at(batch, (feature + int64_t{1}) * batch.batch_size) <= at) ++feature;
  const int table = batch.features[feature].table;
  error = {BatchError::kOutOfRange,           feature, table, at, integer_at(indices, wide, at), 0,
           batch.tables[table].num_embeddings};
  return true;
}

// The first one is told; what fails until the host has read of it is not, nor what fails in another stream meanwhile.
__device__ __forceinline__ void tell(const BatchError& error, const void* table_names, FaultRecord* record) {
  volatile unsigned& state = record->state;
  if (state != FaultRecord::kFree) return;
  if (atomicCAS(&record->state, unsigned{FaultRecord::kFree}, unsigned{FaultRecord::kClaimed}) != FaultRecord::kFree) {
    return;
  }
  record->error = error;
  record->table_names = table_names;
  __threadfence_system();
  state = FaultRecord::kWritten;  // [mutant: untold-fault]
}

// One thread. A batch with an error is marked as failed: its plan will be empty.
__global__ void report_faults(DeviceBatch batch, const void* indices, bool wide, BoundsCheckMode mode,
                              const void* table_names, BatchFaults* faults, FaultRecord* record) {
  BatchError error;
  if (!find_error(batch, indices, wide, mode, *faults, error)) return;
  faults->failed = true;
  tell(error, table_names, record);
}

// One thread: the counts of a plan that is right; of another, those of a plan without rows, and a note for the host.
__global__ void write_checked_counts(DevicePlan plan, const unsigned* wrong, int64_t* checked, FaultRecord* record) {
  const bool good = (wrong[0] | wrong[1] | wrong[2]) == 0;
  for (int i = 0; i < 4; ++i) checked[i] = good || i > 1 ? plan.counts[i] : 0;
  if (!good) tell({BatchError::kWrongPlan, 0, 0, 0, 0, 0, 0}, nullptr, record);
}

}  // namespace flowtt
