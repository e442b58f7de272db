// Grouping a batch: sort, distinct rows, flows.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/executor.h"
#include "flowtt/batch.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// The first place where `offsets` falls, or -1.
int64_t first_fall(const Executor& executor, const Batch& batch);

struct PlanResult {
  PlanCounts counts;
  int64_t first_invalid;  // position of the first row number out of range, or -1
};

// Groups the lookups of `indices` [num_lookups]. The offsets must be known to be right. Stops early, with nothing but
// `num_invalid` and `first_invalid` filled in, when a row number is out of range and `mode` is fatal.
PlanResult make_flow_plan(const Executor& executor, const std::vector<Table>& tables, const Batch& batch,
                          const Integers& indices, Flow flow, BoundsCheckMode mode, const FlowPlanBuffers& out);

// A plan of kind Flow::kDirect in key order: every lookup still a row and a flow of its own.
class SortedPlan {
 public:
  // Keeps `plan` as it is unless its keys are out of order.
  SortedPlan(const Executor& executor, const std::vector<Table>& tables, const FlowPlan& plan);

  const FlowPlan& plan() const { return plan_; }

 private:
  FlowPlan plan_;
  Buffer<int32_t> lookups_;
  Buffer<int64_t> row_keys_;
};

}  // namespace flowtt::cpu
