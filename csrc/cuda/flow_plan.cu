#include "cuda/primitives.h"
#include "cuda/report.h"
#include "cuda/setting.h"
#include "flowtt/flow_plan.cuh"

namespace flowtt::cuda {

void make_flow_plan(const HostBatch& batch, const void* indices, bool wide_indices, Flow flow, BoundsCheckMode mode,
                    const FlowPlanBuffers& plan, int64_t* counts, const Context& context) {
  const auto n = static_cast<int>(batch.num_lookups);
  const int64_t bags = batch.num_features * batch.batch_size;
  const unsigned grid = blocks_for(n);
  std::vector<DeviceTable> tables;
  for (const Table& table : batch.tables) tables.push_back(device_table(table, kLargeSlab));
  const DeviceBatch device = upload(batch, tables, context);
  auto* const faults = allocate<BatchFaults>(context, "faults", 1);
  check(FLOWTT_LAUNCH(clear_faults, 1, 1, 0, context.stream, faults), "clear_faults");
  if (bags > 0) {
    check(FLOWTT_LAUNCH(check_offsets, blocks_for(bags), kThreads, 0, context.stream, device, faults), "check_offsets");
  }
  if (n == 0 || bags == 0) {
    report(device, indices, wide_indices, mode, faults, context);
    check(FLOWTT_LAUNCH(write_empty_plan, 1, 1, 0, context.stream, plan, counts), "write_empty_plan");
    return;
  }
  const bool sorts = flow != Flow::kDirect;
  auto* const keys = allocate<uint64_t>(context, "keys", n);
  auto* const heads = allocate<uint64_t>(context, "heads", n);
  auto* const sorted_keys = sorts ? allocate<uint64_t>(context, "sorted keys", n) : keys;
  auto* const positions = sorts ? allocate<int32_t>(context, "positions", n) : plan.lookups;
  check(FLOWTT_LAUNCH(make_keys, grid, kThreads, 0, context.stream, device, indices, wide_indices, keys, positions,
                      plan.bags, faults),
        "make_keys");
  report(device, indices, wide_indices, mode, faults, context);
  if (sorts) {
    const int bits = batch.tables[0].table_shift + bits_for(static_cast<int64_t>(batch.tables.size()));
    size_t bytes = 0;
    check(sort_pairs(nullptr, bytes, keys, sorted_keys, positions, plan.lookups, n, bits, context.stream), "sort");
    check(sort_pairs(context.allocate("sort", bytes), bytes, keys, sorted_keys, positions, plan.lookups, n, bits,
                     context.stream),
          "sort");
  }
  check(FLOWTT_LAUNCH(mark_heads, grid, kThreads, 0, context.stream, device, flow, sorted_keys, heads), "mark_heads");
  size_t bytes = 0;
  check(running_sum(nullptr, bytes, heads, n, context.stream), "running sum");
  check(running_sum(context.allocate("running sum", bytes), bytes, heads, n, context.stream), "running sum");
  check(FLOWTT_LAUNCH(write_starts, grid, kThreads, 0, context.stream, sorted_keys, heads, n, plan, counts, faults),
        "write_starts");
}

}  // namespace flowtt::cuda
