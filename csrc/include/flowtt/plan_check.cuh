// Whether a flow plan is one of a batch and a group of tables, as plan_check.h of the CPU: a plan may come from
// anywhere.
#pragma once

#include "flowtt/bisection.cuh"
#include "flowtt/device_batch.cuh"

namespace flowtt {

// Each of the three kernels has its own flag in `wrong` [3], and goes on only where those before found nothing.
//
// Counts and offsets. One thread.
__global__ void check_counts(DeviceBatch batch, DevicePlan plan, int64_t fingerprint, const BatchFaults* faults,
                             unsigned* wrong) {
  const int64_t n = batch.num_lookups, rows = plan.counts[0], flows = plan.counts[1];
  const bool failed = rows == 0 && flows == 0;  // of a batch that could not be taken
  bool good = plan.counts[3] == fingerprint && 0 <= flows && flows <= rows && rows <= n && (failed || flows > 0);
  good = good && faults->first_fall == kNowhere && offset_at(batch, 0) == 0 &&
         offset_at(batch, int64_t{batch.num_features} * batch.batch_size) == n;
  if (good && !failed) {
    good = plan.row_starts[0] == 0 && plan.row_starts[rows] == n && plan.flow_starts[0] == 0 &&
           plan.flow_starts[flows] == rows;
  }
  wrong[0] = good ? 0u : 1u;
  wrong[1] = wrong[2] = 0u;
}

FLOWTT_INLINE bool is_key(const DeviceBatch& batch, int64_t key) {
  const int64_t number = key >> batch.table_shift;
  if (number < 0 || number >= batch.num_tables) return false;
  const DeviceTable& table = batch.tables[number];
  int64_t row = 0, rest = key ^ number << batch.table_shift;
  for (int k = 0; k < table.num_cores; ++k) {
    const int bits = 32 - __clz(table.p[k] - 1);
    const int64_t digit = key >> table.digit_shift[k] & ((int64_t{1} << bits) - 1);
    if (digit >= table.p[k]) return false;
    row = row * table.p[k] + digit;
    rest ^= digit << table.digit_shift[k];
  }
  return rest == 0 && row < table.num_embeddings;
}

// A thread an entry of each array, by itself: bags, starts and keys.
__global__ void check_entries(DeviceBatch batch, DevicePlan plan, unsigned* wrong) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int64_t rows = plan.counts[0], flows = plan.counts[1];
  if (i >= batch.num_lookups || rows == 0 || wrong[0] != 0) return;
  const int bag = plan.bags[i];
  bool good = 0 <= bag && bag < batch.num_features * batch.batch_size && offset_at(batch, bag) <= i &&
              i < offset_at(batch, int64_t{bag} + 1);
  if (i < rows) good = good && plan.row_starts[i] < plan.row_starts[i + 1] && is_key(batch, plan.row_keys[i]);
  if (i < flows) good = good && plan.flow_starts[i] < plan.flow_starts[i + 1];
  if (!good) atomicAdd(wrong + 1, 1u);
}

// A thread a place in key order: order of rows and lookups, and whose they are. `seen` [num_lookups] is zeros.
__global__ void check_places(DeviceBatch batch, DevicePlan plan, unsigned* seen, unsigned* wrong) {
  const int place = blockIdx.x * kThreads + threadIdx.x;
  const int rows = static_cast<int>(plan.counts[0]), flows = static_cast<int>(plan.counts[1]);
  if (place >= batch.num_lookups || rows == 0 || (wrong[0] | wrong[1]) != 0) return;
  const int row = row_at(plan, rows, place), lookup = plan.lookups[place];
  const int64_t key = plan.row_keys[row];
  bool good = 0 <= lookup && lookup < batch.num_lookups;
  if (good) {
    good = atomicAdd(seen + lookup, 1u) == 0u;
    good = good && batch.features[plan.bags[lookup] / batch.batch_size].table == key >> batch.table_shift;
    good = good && (plan.row_starts[row] == place || plan.lookups[place - 1] < lookup);
  }
  if (place < rows) {
    // By itself and in the order given, as in a direct plan, or in key order.
    const bool direct = flows == batch.num_lookups && lookup == place;
    good = good && (direct || place == 0 || plan.row_keys[place - 1] < plan.row_keys[place]);
    const int flow = last_where(flows, [&](int f) { return plan.flow_starts[f] <= place; });
    const int64_t first = plan.row_keys[plan.flow_starts[flow]], own = plan.row_keys[place];
    good = good && (first ^ own) >> batch.tables[own >> batch.table_shift].digit_shift[0] == 0;
  }
  if (!good) atomicAdd(wrong + 2, 1u);
}

}  // namespace flowtt
