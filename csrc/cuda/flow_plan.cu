#include "cuda/primitives.h"
#include "cuda/report.h"
#include "cuda/setting.h"
#include "flowtt/flow_plan.cuh"
#include "flowtt/plan_check.cuh"

namespace flowtt::cuda {

namespace {

template <class Key>
void group(const HostBatch& batch, const DeviceBatch& device, const void* indices, bool wide_indices, Flow flow,
           BoundsCheckMode mode, const std::string* table_names, const FlowPlanBuffers& plan, int64_t* counts, int bits,
           BatchFaults* faults, const Context& context) {
  const auto n = static_cast<int>(batch.num_lookups);
  const unsigned grid = blocks_for(n);
  const bool sorts = flow != Flow::kDirect;
  auto* const keys = allocate<Key>(context, "keys", n);
  auto* const heads = allocate<uint64_t>(context, "heads", n);
  auto* const sorted_keys = sorts ? allocate<Key>(context, "sorted keys", n) : keys;
  auto* const positions = sorts ? allocate<int32_t>(context, "positions", n) : plan.lookups;
  check(FLOWTT_LAUNCH(make_keys<Key>, grid, kThreads, 0, context.stream, device, indices, wide_indices, keys, positions,
                      plan.bags, faults),
        "make_keys");
  report(device, indices, wide_indices, mode, table_names, faults, context);
  if (sorts) {
    size_t bytes = 0;
    check(sort_pairs(nullptr, bytes, keys, sorted_keys, positions, plan.lookups, n, bits, context.stream), "sort");
    check(sort_pairs(context.allocate("sort", bytes), bytes, keys, sorted_keys, positions, plan.lookups, n, bits,
                     context.stream),
          "sort");
  }
  check(FLOWTT_LAUNCH(mark_heads<Key>, grid, kThreads, 0, context.stream, device, flow, sorted_keys, heads),
        "mark_heads");
  size_t bytes = 0;
  check(running_sum(nullptr, bytes, heads, n, context.stream), "running sum");
  check(running_sum(context.allocate("running sum", bytes), bytes, heads, n, context.stream), "running sum");
  check(FLOWTT_LAUNCH(write_starts<Key>, grid, kThreads, 0, context.stream, sorted_keys, heads, n, plan, counts,
                      batch.fingerprint, faults),
        "write_starts");
}

// Descriptors on the device, of which plans need but keys and columns.
DeviceBatch describe(const HostBatch& batch, const Context& context) {
  std::vector<DeviceTable> tables;
  for (const Table& table : batch.tables)
    tables.push_back(device_table(table, kLargeSlab, sizeof(float), Direction::kForward));
  return upload(batch, tables, context);
}

// Looks for offsets that fall.
BatchFaults* find_falls(const HostBatch& batch, const DeviceBatch& device, const Context& context) {
  const int64_t bags = batch.num_features * batch.batch_size;
  auto* const faults = allocate<BatchFaults>(context, "faults", 1);
  check(FLOWTT_LAUNCH(clear_faults, 1, 1, 0, context.stream, faults), "clear_faults");
  if (bags > 0) {
    check(FLOWTT_LAUNCH(check_offsets, blocks_for(bags), kThreads, 0, context.stream, device, faults), "check_offsets");
  }
  return faults;
}

}  // namespace

void make_flow_plan(const HostBatch& batch, const void* indices, bool wide_indices, Flow flow, BoundsCheckMode mode,
                    const std::string* table_names, const FlowPlanBuffers& plan, int64_t* counts,
                    const Context& context) {
  const int64_t bags = batch.num_features * batch.batch_size;
  const DeviceBatch device = describe(batch, context);
  BatchFaults* const faults = find_falls(batch, device, context);
  if (batch.num_lookups == 0 || bags == 0) {
    report(device, indices, wide_indices, mode, table_names, faults, context);
    check(FLOWTT_LAUNCH(write_empty_plan, 1, 1, 0, context.stream, plan, counts, batch.fingerprint),
          "write_empty_plan");
    return;
  }
  const int bits = batch.tables[0].table_shift + bits_for(static_cast<int64_t>(batch.tables.size()));
  if (bits <= 32) {
    group<uint32_t>(batch, device, indices, wide_indices, flow, mode, table_names, plan, counts, bits, faults, context);
  } else {
    group<uint64_t>(batch, device, indices, wide_indices, flow, mode, table_names, plan, counts, bits, faults, context);
  }
}

void check_plan(const HostBatch& batch, const PlanPointers& plan, int64_t* checked, const Context& context) {
  const DeviceBatch device = describe(batch, context);
  const BatchFaults* const faults = find_falls(batch, device, context);
  const DevicePlan on_device = device_plan(plan);
  auto* const wrong = allocate<unsigned>(context, "wrong", 3);
  check(FLOWTT_LAUNCH(check_counts, 1, 1, 0, context.stream, device, on_device, batch.fingerprint, faults, wrong),
        "check_counts");
  if (const auto n = static_cast<int>(batch.num_lookups); n > 0) {
    auto* const seen = allocate<unsigned>(context, "seen", n);
    check(cudaMemsetAsync(seen, 0, n * sizeof(unsigned), context.stream), "cudaMemsetAsync");
    check(FLOWTT_LAUNCH(check_entries, blocks_for(n), kThreads, 0, context.stream, device, on_device, wrong),
          "check_entries");
    check(FLOWTT_LAUNCH(check_places, blocks_for(n), kThreads, 0, context.stream, device, on_device, seen, wrong),
          "check_places");
  }
  write_counts(on_device, wrong, checked, context);
}

}  // namespace flowtt::cuda
