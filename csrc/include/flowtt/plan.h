// The flow plan: a batch's lookups grouped into distinct rows, and those into flows.
#pragma once

#include <cstdint>

namespace flowtt {

enum class Flow : int64_t {
  kPrefix = 0,  // equal rows once; rows of one prefix share its product
  kUnique = 1,  // equal rows once, every row a flow of its own
  kDirect = 2,  // every lookup a row and a flow of its own, in the order given
};

// What happens to a row number that its table does not have; numbered as FBGEMM's modes.
enum class BoundsCheckMode : int64_t { kFatal = 0, kWarning = 1, kIgnore = 2 };

enum class PoolingMode : int64_t { kSum = 0, kMean = 1 };

enum class Optimizer : int64_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };

// One step of a fused optimizer on one table, for each element of a slice with gradient g:
//   g += weight_decay * w;  momentum1 += g^2 (Adagrad), or += mean over the slice of g^2 (row-wise Adagrad);
//   w -= learning_rate * g / (sqrt(momentum1) + eps), for SGD w -= learning_rate * g.
// Adam, without the first line:
//   momentum1 = beta1 * momentum1 + (1 - beta1) * g;  momentum2 = beta2 * momentum2 + (1 - beta2) * g^2;
//   w -= learning_rate * (momentum1 / correction1 / (sqrt(momentum2 / correction2) + eps) + weight_decay * w).
// Where a root plus eps is 0, as a gradient of 0 and an eps of 0 make it, it counts as 1: there is no step then.
template <class T>
struct UpdateRule {
  Optimizer optimizer;
  T learning_rate, eps, weight_decay;
  T beta1, beta2;
  T correction1, correction2;  // 1 - beta^step
  int64_t rounding_seed;       // of what is stored in 16 bits, in this step; -1: to the nearest
};

// A plan as the kernels read it. N lookups, U distinct rows, P flows.
struct FlowPlan {
  int64_t num_lookups;
  int64_t num_rows;
  int64_t num_flows;
  const int32_t* lookups;      // [N] positions of the lookups in key order
  const int32_t* bags;         // [N] bag, feature * batch_size + sample, of each lookup position
  const int64_t* row_keys;     // [U] key of each distinct row
  const int32_t* row_starts;   // [U + 1] first place in `lookups` of each distinct row
  const int32_t* flow_starts;  // [P + 1] first distinct row of each flow
};

// The arrays that a plan is written to; sizes as in FlowPlan with U = P = N.
struct FlowPlanBuffers {
  int32_t* lookups;
  int32_t* bags;
  int64_t* row_keys;
  int32_t* row_starts;
  int32_t* flow_starts;
};

struct PlanCounts {
  int64_t num_rows;
  int64_t num_flows;
  int64_t num_invalid;  // row numbers out of range
};

}  // namespace flowtt
