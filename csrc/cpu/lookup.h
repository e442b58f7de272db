// What the pooled lookup and its gradient are called with.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/weights.h"
#include "flowtt/batch.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

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

}  // namespace flowtt::cpu
