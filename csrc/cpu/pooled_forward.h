// Pooled rows of a batch whose flow plan is known.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/executor.h"
#include "cpu/weights.h"
#include "flowtt/batch.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Arguments of the pooled lookup and its gradient.
template <class T>
struct Lookup {
  const std::vector<Table>& tables;
  const Batch& batch;
  FlowPlan plan;
  Weights<T> weights;           // [num_parameters] the cores of all tables
  const T* per_sample_weights;  // [num_lookups] factor of each lookup, or null for 1
  PoolingMode pooling_mode;
  int64_t total_dim;
};

// Writes all of `output` [batch_size, total_dim].
template <class T>
void pooled_forward(const Executor& executor, const Lookup<T>& lookup, T* output);

}  // namespace flowtt::cpu
