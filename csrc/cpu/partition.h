// Sharing flows and bags out over tasks by cost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/executor.h"
#include "cpu/hot_rows.h"
#include "flowtt/batch.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Neighbouring flows of one table.
struct Segment {
  int64_t table;
  int64_t flow_begin, flow_end;
  int64_t row_begin, row_end;
};

// What one flow, one distinct row and one lookup of a table cost, in about a cycle.
struct Cost {
  double flow, row, lookup;
};

// The flows of a plan in key order, table by table.
std::vector<Segment> segments_by_table(const std::vector<Table>& tables, const FlowPlan& plan);

// Whether row i is lookup i, in a flow of its own: always so in a direct plan.
bool rows_are_lookups(const FlowPlan& plan);

// The flows of such a plan, feature by feature.
std::vector<Segment> segments_by_feature(const Batch& batch);

// Cuts a sequence of items into as many ranges as there are tasks, each with about its share of the cost: task t has
// items [cuts[t], cuts[t + 1]). The sequence comes in segments, segment s being items [begin(s), begin(s + 1));
// cost_before(s, i) is the cost, within segment s, of its items before i, in about a cycle.
template <class Begin, class CostBefore>
std::vector<int64_t> cut_by_cost(const Executor& executor, int64_t num_segments, const Begin& begin,
                                 const CostBefore& cost_before) {
  constexpr int64_t kCyclesPerTask = 20000;  // less is not worth waking a thread
  std::vector<double> total(static_cast<size_t>(num_segments) + 1, 0.0);
  for (int64_t s = 0; s < num_segments; ++s) total[s + 1] = total[s] + cost_before(s, begin(s + 1));
  const int64_t tasks = executor.num_tasks(static_cast<int64_t>(total.back()), kCyclesPerTask);
  std::vector<int64_t> cuts(static_cast<size_t>(tasks) + 1, begin(0));
  cuts[tasks] = begin(num_segments);
  for (int64_t task = 1; task < tasks; ++task) {
    const double share = total.back() * static_cast<double>(task) / static_cast<double>(tasks);
    // The last segment that starts within the share, then the first item that reaches it.
    const int64_t s = std::upper_bound(total.begin(), total.end() - 1, share) - total.begin() - 1;
    int64_t low = begin(s), high = begin(s + 1);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (total[s] + cost_before(s, middle) < share) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    cuts[task] = low;
  }
  return cuts;
}

// cut_by_cost for flows; `costs` is by table. Lookups of hot rows, which are not the flows' work, cost nothing.
std::vector<int64_t> cut_flows(const Executor& executor, const std::vector<Segment>& segments,
                               const std::vector<Cost>& costs, const FlowPlan& plan, const HotRows& hot);

// cut_by_cost for bags; a bag and a lookup cost about what their table has columns.
std::vector<int64_t> cut_bags(const Executor& executor, const std::vector<Table>& tables, const Batch& batch);

}  // namespace flowtt::cpu
