// Whether a flow plan is one of a batch and a group of tables: a plan may come from anywhere.
#pragma once

#include <vector>

#include "cpu/executor.h"
#include "flowtt/batch.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// What is wrong with the plan, or null. Whatever it holds, no memory but its arrays is read; with a plan that passes,
// the kernels stay within theirs. The offsets must be known to be right.
const char* fault_of_plan(const Executor& executor, const std::vector<Table>& tables, const Batch& batch,
                          const FlowPlan& plan);

}  // namespace flowtt::cpu
