// Grouping a batch: keys, then (sorted by primitives.cu) heads of rows and flows. The host learns no count. Keys are of
// 32 bits where tables and digits fit.
#pragma once

#include "flowtt/bisection.cuh"
#include "flowtt/device_batch.cuh"
#include "flowtt/plan.h"

namespace flowtt {

__global__ void clear_faults(BatchFaults* faults) { *faults = {0, kNowhere, kNowhere, false}; }

__global__ void check_offsets(DeviceBatch batch, BatchFaults* faults) {
  const int64_t bag = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (bag >= int64_t{batch.num_features} * batch.batch_size) return;
  if (offset_at(batch, bag + 1) < offset_at(batch, bag)) {
    atomicMin(&faults->first_fall, static_cast<unsigned long long>(bag));
  }
}

// Key, bag and position of every lookup. A row number out of range counts as row 0.
template <class Key>
__global__ void make_keys(DeviceBatch batch, const void* indices, bool wide, Key* keys, int32_t* positions,
                          int32_t* bags, BatchFaults* faults) {
  const int l = blockIdx.x * kThreads + threadIdx.x;
  if (l >= batch.num_lookups) return;
  const int bag = last_where(batch.num_features * batch.batch_size, [&](int i) { return offset_at(batch, i) <= l; });
  const int number = batch.features[bag / batch.batch_size].table;
  const DeviceTable& table = batch.tables[number];
  int64_t row = integer_at(indices, wide, l);
  if (row < 0 || row >= table.num_embeddings) {
    atomicAdd(&faults->num_invalid, 1ull);
    atomicMin(&faults->first_invalid, static_cast<unsigned long long>(l));
    row = 0;  // [mutant: row-out-of-range]
  }
  uint64_t key = static_cast<uint64_t>(number) << batch.table_shift;
  for (int k = table.num_cores - 1; k >= 0; --k) {
    const int64_t next = row / table.p[k];
    key |= static_cast<uint64_t>(row - next * table.p[k]) << table.digit_shift[k];
    row = next;
  }
  keys[l] = static_cast<Key>(key);
  positions[l] = l;
  bags[l] = bag;
}

// Where rows and flows start, packed so that one running sum numbers both: flows in the upper half.
template <class Key>
__global__ void mark_heads(DeviceBatch batch, Flow flow, const Key* keys, uint64_t* heads) {
  const int s = blockIdx.x * kThreads + threadIdx.x;
  if (s >= batch.num_lookups) return;
  constexpr uint64_t kBoth = uint64_t{1} << 32 | 1;
  const uint64_t key = keys[s], before = s > 0 ? keys[s - 1] : ~key;
  if (flow == Flow::kDirect || s == 0) {
    heads[s] = kBoth;
  } else if (key == before) {
    heads[s] = 0;
  } else {
    const DeviceTable& table = batch.tables[key >> batch.table_shift];
    // [mutant: high-prefix]
    heads[s] = flow == Flow::kUnique || (key ^ before) >> table.digit_shift[0] != 0 ? kBoth : 1;
  }
}

// numbers: running sum of the heads. A failed batch has a plan without rows: nothing is looked up, or stepped.
template <class Key>
__global__ void write_starts(const Key* keys, const uint64_t* numbers, int num_lookups, FlowPlanBuffers plan,
                             int64_t* counts, int64_t fingerprint, const BatchFaults* faults) {
  const int s = blockIdx.x * kThreads + threadIdx.x;
  if (s >= num_lookups) return;
  const uint64_t number = numbers[s], before = s > 0 ? numbers[s - 1] : 0;
  const int rows = static_cast<int>(static_cast<uint32_t>(number)), flows = static_cast<int>(number >> 32);
  if (rows != static_cast<int>(static_cast<uint32_t>(before))) {
    plan.row_keys[rows - 1] = static_cast<int64_t>(keys[s]);
    plan.row_starts[rows - 1] = s;
    if (flows != static_cast<int>(before >> 32)) plan.flow_starts[flows - 1] = rows - 1;
  }
  if (s == num_lookups - 1) {
    plan.row_starts[rows] = num_lookups;
    plan.flow_starts[flows] = rows;
    counts[0] = faults->failed ? 0 : rows;  // [mutant: failed-lookup]
    counts[1] = faults->failed ? 0 : flows;
    counts[2] = static_cast<int64_t>(faults->num_invalid);
    counts[3] = fingerprint;
  }
}

__global__ void write_empty_plan(FlowPlanBuffers plan, int64_t* counts, int64_t fingerprint) {
  plan.row_starts[0] = plan.flow_starts[0] = 0;
  for (int i = 0; i < 3; ++i) counts[i] = 0;
  counts[3] = fingerprint;
}

}  // namespace flowtt
