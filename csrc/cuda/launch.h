// The CUDA ops without torch: device pointers, what the host knows of the batch, a stream.
//
// Nothing here waits for the device, and no launch depends on a number that only the device knows: every sequence can
// be captured in a CUDA graph. Errors are std::runtime_error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flowtt/plan.h"
#include "flowtt/rounding.h"
#include "flowtt/table.h"

namespace flowtt::cuda {

struct HostBatch {
  std::vector<Table> tables;
  const int64_t* features;  // on the host, [num_features, kFeatureColumns]
  int64_t num_features, batch_size, num_lookups;
  const void* offsets;  // on the device, [num_features * batch_size + 1]
  bool wide_offsets;    // int64
  int64_t total_dim;    // of the output
  int64_t fingerprint;  // of the layout
};

// Who works on which tiles: for ablations. Results do not depend on it.
struct Mapping {
  bool by_work = true;   // shares of equal work, else of equal numbers of rows
  bool steal = true;     // blocks without work take some of others'
  bool handover = true;  // products of flows that go on beyond a block's tiles are handed to the next block
};

struct Context {
  std::function<void*(const char* name, size_t bytes)> allocate;  // device memory that lives as long as the op
  cudaStream_t stream;
  Mapping mapping;
  int64_t row_bytes;  // that rows, or their gradients, may take at a time; more where that would be over 16 waves
  bool tf32;          // products of float32 cores may have the accuracy of TF32
};

// The cores: float32, bfloat16 or float16.
struct Weights {
  void* data;
  Storage storage;

  int element_bytes() const { return storage == Storage::kFloat32 ? 4 : 2; }
};

struct PlanPointers {
  const int32_t *lookups, *bags;
  const int64_t* row_keys;
  const int32_t *row_starts, *flow_starts;
  const int64_t* counts;  // on the device, unlike FlowPlan's numbers
};

struct PoolingArguments {
  const float* factors;  // per-sample weights [num_lookups], or null
  PoolingMode mode;
};

struct BackwardTargets {
  const float* grad_output;  // [batch_size, total_dim]
  float* grad_factors;       // [num_lookups], or null
  bool deterministic;
};

struct Update {
  std::vector<UpdateRule<float>> rules;  // of each table
  float *momentum1, *momentum2;          // of each parameter, the first of each slice for row-wise Adagrad; or null
};

// Groups the lookups of `indices` [num_lookups]. Of a batch that cannot be taken the device makes a plan without rows,
// and a note for raise_fault. table_names, joined by newlines, must live as long as the process does.
void make_flow_plan(const HostBatch& batch, const void* indices, bool wide_indices, Flow flow, BoundsCheckMode mode,
                    const std::string* table_names, const FlowPlanBuffers& plan, int64_t* counts,
                    const Context& context);

// Writes the counts [4] of a plan that is one of the batch; of another, those of a plan without rows, and a note for
// raise_fault.
void check_plan(const HostBatch& batch, const PlanPointers& plan, int64_t* checked, const Context& context);

// Throws, once, what the current device has found wrong with a batch; does not wait for it.
void raise_fault();

// output [batch_size, total_dim]
void pooled_forward(const HostBatch& batch, const PlanPointers& plan, const Weights& weights,
                    const PoolingArguments& pooling, float* output, const Context& context);

// grad_weights: like the weights, float32
void pooled_backward(const HostBatch& batch, const PlanPointers& plan, const Weights& weights,
                     const PoolingArguments& pooling, const BackwardTargets& targets, float* grad_weights,
                     const Context& context);

// Steps the optimizer on `weights` in place.
void pooled_backward_update(const HostBatch& batch, const PlanPointers& plan, const Weights& weights,
                            const PoolingArguments& pooling, const BackwardTargets& targets, const Update& update,
                            const Context& context);

struct LaunchSize {
  int tile_rows;
  size_t shared_bytes;  // of a block
  int slab;             // elements of a middle slice that a block works on at a time, at most
};

// How forward or backward of these tables is launched on a device with this much shared memory a block.
LaunchSize launch_size(const std::vector<Table>& tables, int element_bytes, bool backward, size_t shared_limit);

}  // namespace flowtt::cuda
