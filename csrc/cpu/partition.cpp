#include "cpu/partition.h"

namespace flowtt::cpu {
std::vector<Segment> segments_by_feature(const Batch& batch) {
  std::vector<Segment> segments;
  for (int64_t feature = 0; feature < batch.num_features; ++feature) {
    const int64_t begin = batch.start(feature), end = batch.start(feature + 1);
    if (begin < end) segments.push_back({batch.table(feature), begin, end, begin, end});
  }
  return segments;
}

bool rows_are_lookups(const FlowPlan& plan) {
  if (plan.num_flows != plan.num_lookups) return false;
  for (int64_t i = 0; i < plan.num_lookups; ++i) {
    if (plan.lookups[i] != i) return false;
  }
  return true;
}

std::vector<Segment> segments_by_table(const std::vector<Table>& tables, const FlowPlan& plan) {
  std::vector<Segment> segments;
  const int shift = tables[0].table_shift;
  for (int64_t flow = 0; flow < plan.num_flows;) {
    const int64_t row = plan.flow_starts[flow];
    const int64_t table = plan.row_keys[row] >> shift;
    const int64_t* row_end = std::lower_bound(plan.row_keys + row, plan.row_keys + plan.num_rows, (table + 1) << shift);
    const int64_t rows = row_end - plan.row_keys;
    const int32_t* flow_end = std::lower_bound(plan.flow_starts + flow, plan.flow_starts + plan.num_flows, rows);
    const int64_t flows = flow_end - plan.flow_starts;
    segments.push_back({table, flow, flows, row, rows});
    flow = flows;
  }
  return segments;
}

std::vector<int64_t> cut_flows(const Executor& executor, const std::vector<Segment>& segments,
                               const std::vector<Cost>& costs, const FlowPlan& plan, const HotRows& hot) {
  const auto begin = [&](int64_t s) {
    return s < static_cast<int64_t>(segments.size()) ? segments[s].flow_begin : plan.num_flows;
  };
  const auto cost_before = [&](int64_t s, int64_t flow) {
    const Segment& segment = segments[s];
    const Cost& cost = costs[segment.table];
    const int64_t row = plan.flow_starts[flow];
    const auto lookups_before = [&](int64_t r) { return plan.row_starts[r] - hot.lookups_before(r); };
    return cost.flow * static_cast<double>(flow - segment.flow_begin) +
           cost.row * static_cast<double>(row - segment.row_begin) +
           cost.lookup * static_cast<double>(lookups_before(row) - lookups_before(segment.row_begin));
  };
  return cut_by_cost(executor, static_cast<int64_t>(segments.size()), begin, cost_before);
}

std::vector<int64_t> cut_bags(const Executor& executor, const std::vector<Table>& tables, const Batch& batch) {
  const auto begin = [&](int64_t feature) { return feature * batch.batch_size; };
  const auto cost_before = [&](int64_t feature, int64_t bag) {
    const int64_t first = begin(feature);
    const double items = static_cast<double>(bag - first + batch.offsets[bag] - batch.offsets[first]);
    return items * (static_cast<double>(tables[batch.table(feature)].dim) / 8 + 4);
  };
  return cut_by_cost(executor, batch.num_features, begin, cost_before);
}

}  // namespace flowtt::cpu
