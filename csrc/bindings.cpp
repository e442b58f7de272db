// The ops: schemas, and the CPU kernels behind them. Of torch, only the stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "cpu/buffer.h"
#include "cpu/flow_plan.h"
#include "cpu/isa.h"
#include "cpu/plan_check.h"
#include "cpu/pooled_backward.h"
#include "cpu/pooled_forward.h"
#include "flowtt/batch.h"
#include "flowtt/batch_error.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"
#include "schemas.h"

namespace flowtt {
namespace {

std::optional<Tensor> recorded_stages;  // keeps the memory that kernels add their times to

cpu::Executor torch_threads() {
  cpu::Executor executor{static_cast<int>(torch::stable::get_num_threads()),
                         [](int64_t num_tasks, const std::function<void(int64_t)>& body) {
                           torch::stable::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
                             for (int64_t task = begin; task < end; ++task) body(task);
                           });
                         }};
  if (recorded_stages) {
    executor.stage_seconds = recorded_stages->mutable_data_ptr<double>();
    executor.lap_start = std::chrono::steady_clock::now();
  }
  return executor;
}

[[noreturn]] void raise_out_of_range(const std::vector<Table>& tables, const std::string& table_names,
                                     const Batch& batch, const Integers& indices, int64_t position) {
  int64_t feature = 0;
  while (batch.start(feature + 1) <= position) ++feature;
  const int64_t table = batch.table(feature);
  raise_batch_error({BatchError::kOutOfRange, static_cast<int32_t>(feature), static_cast<int32_t>(table), position,
                     indices[position], 0, tables[table].num_embeddings},
                    table_names);
}

// Raises an error unless the offsets lead from 0 to the number of lookups.
void check_offsets(const cpu::Executor& executor, const Batch& batch, const std::string& table_names) {
  const int64_t bags = batch.num_bags(), n = batch.num_lookups;
  if (batch.offsets[0] != 0 || batch.offsets[bags] != n) {
    raise_batch_error({BatchError::kWrongEnds, 0, 0, 0, batch.offsets[0], batch.offsets[bags], n}, table_names);
  }
  if (const int64_t at = cpu::first_fall(executor, batch); at >= 0) {
    raise_batch_error({BatchError::kFall, 0, 0, at, batch.offsets[at], batch.offsets[at + 1], 0}, table_names);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> flow_plan(Tensor tables, Tensor table_names, Tensor features,
                                                                     Tensor indices, Tensor offsets, int64_t flow,
                                                                     int64_t bounds_check_mode) {
  const std::vector<Table> described = read_tables(tables);
  const Integers rows = integers("indices", indices);
  const int64_t n = indices.numel();
  const Batch batch = read_batch(features, offsets, n, described.size());
  const Flow how = read_flow(flow);
  const BoundsCheckMode mode = read_bounds_check_mode(bounds_check_mode);

  const std::string names = text_of("table_names", table_names);
  cpu::begin_call();
  const cpu::Executor executor = torch_threads();
  check_offsets(executor, batch, names);

  PlanTensors plan;
  plan.for_each(n, [&](const char*, Tensor& tensor, int64_t size, ScalarType type) {
    tensor = torch::stable::new_empty(indices, {size}, type);
  });
  const cpu::PlanResult result = cpu::make_flow_plan(executor, described, batch, rows, how, mode, plan.buffers());
  if (result.first_invalid >= 0 && mode == BoundsCheckMode::kFatal) {
    raise_out_of_range(described, names, batch, rows, result.first_invalid);
  }
  auto* numbers = plan.counts.mutable_data_ptr<int64_t>();
  numbers[0] = result.counts.num_rows;
  numbers[1] = result.counts.num_flows;
  numbers[2] = result.counts.num_invalid;
  numbers[3] = fingerprint_of(tables);
  return plan.result();
}

// Checks the plan and reads it.
FlowPlan read_plan(PlanTensors& tensors) {
  const int64_t n = tensors.lookups.numel();
  tensors.for_each(n, [](const char* name, const Tensor& tensor, int64_t size, ScalarType type) {
    check_shape(name, tensor, {size});
    check_type(name, tensor, type);
  });
  const auto* counts = tensors.counts.const_data_ptr<int64_t>();
  if (counts[1] < 0 || counts[1] > counts[0] || counts[0] > n) raise_wrong_plan("counts are not those of its lookups");
  return {n,
          counts[0],
          counts[1],
          tensors.lookups.const_data_ptr<int32_t>(),
          tensors.bags.const_data_ptr<int32_t>(),
          tensors.row_keys.const_data_ptr<int64_t>(),
          tensors.row_starts.const_data_ptr<int32_t>(),
          tensors.flow_starts.const_data_ptr<int32_t>()};
}

Tensor check_plan(Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags, Tensor row_keys,
                  Tensor row_starts, Tensor flow_starts, Tensor counts) {
  PlanTensors tensors{lookups, bags, row_keys, row_starts, flow_starts, counts};
  const std::vector<Table> described = read_tables(tables);
  const FlowPlan plan = read_plan(tensors);
  const Batch batch = read_batch(features, offsets, plan.num_lookups, described.size());
  const auto* numbers = counts.const_data_ptr<int64_t>();
  if (numbers[3] != fingerprint_of(tables)) raise_wrong_plan("it has the fingerprint of another layout");
  const cpu::Executor executor = torch_threads();
  check_offsets(executor, batch, "");
  if (const char* const why = cpu::fault_of_plan(executor, described, batch, plan)) raise_wrong_plan(why);
  Tensor checked = torch::stable::new_empty(counts, {4}, ScalarType::Long);
  std::copy_n(numbers, 4, checked.mutable_data_ptr<int64_t>());
  return checked;
}

template <class T>
cpu::Weights<T> read_weights(const Tensor& weights) {
  if constexpr (std::is_same_v<T, float>) {
    const auto* bits = static_cast<const uint16_t*>(weights.const_data_ptr());
    const cpu::InstructionSet& isa = cpu::instruction_set();
    if (weights.scalar_type() == ScalarType::BFloat16) return {bits, isa.bfloat16, isa.tiles};
    if (weights.scalar_type() == ScalarType::Half) return {bits, isa.float16, nullptr};
  }
  return cpu::Weights<T>(weights.const_data_ptr<T>());
}

template <class T>
cpu::MutableWeights<T> mutable_weights(Tensor& weights) {
  if constexpr (std::is_same_v<T, float>) {
    auto* bits = static_cast<uint16_t*>(weights.mutable_data_ptr());
    const cpu::InstructionSet& isa = cpu::instruction_set();
    if (weights.scalar_type() == ScalarType::BFloat16) return {bits, isa.bfloat16};
    if (weights.scalar_type() == ScalarType::Half) return {bits, isa.float16};
  }
  return cpu::MutableWeights<T>(weights.mutable_data_ptr<T>());
}

// What is computed with weights of a type, and the type of all other tensors of numbers.
ScalarType compute_type(const Tensor& weights) {
  return weights.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

struct Problem {
  std::vector<Table> tables;
  Batch batch;
  FlowPlan plan;
  PoolingMode pooling_mode;
  int64_t total_dim;

  template <class T>
  cpu::Lookup<T> lookup(const Tensor& weights, const std::optional<Tensor>& per_sample_weights) const {
    return {tables,
            batch,
            plan,
            read_weights<T>(weights),
            per_sample_weights ? per_sample_weights->const_data_ptr<T>() : nullptr,
            pooling_mode,
            total_dim};
  }
};

Problem read_problem(const Tensor& weights, const Tensor& tables, const Tensor& features, const Tensor& offsets,
                     PlanTensors& plan, const std::optional<Tensor>& per_sample_weights, int64_t total_dim,
                     int64_t pooling_mode) {
  std::vector<Table> described = read_tables(tables);
  const FlowPlan grouped = read_plan(plan);
  const Batch batch = read_batch(features, offsets, grouped.num_lookups, described.size());
  const PoolingMode pooling = read_pooling_mode(pooling_mode);

  check_shape("weights", weights, {-1});
  const ScalarType type = weights.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::BFloat16 ||
            type == ScalarType::Half,
        "weights must be float32, float64, bfloat16 or float16, not ", name_of(type));
  const int64_t parameters = num_parameters(described);
  check(weights.numel() == parameters, "weights must have the ", parameters, " elements that the tables describe, not ",
        weights.numel());
  if (per_sample_weights) {
    check_shape("per_sample_weights", *per_sample_weights, {grouped.num_lookups});
    check_type("per_sample_weights", *per_sample_weights, compute_type(weights));
  }
  check_columns(batch, described, total_dim);
  return {std::move(described), batch, grouped, pooling, total_dim};
}

// Calls body with a value of the type that is computed with.
template <class Body>
void with_type(const Tensor& weights, const Body& body) {
  compute_type(weights) == ScalarType::Float ? body(float{}) : body(double{});
}

// Malloc may hand out larger ones without pages, every time anew: to fill those takes longer than to make the rows.
constexpr size_t kPooledTensor = size_t{4} << 20;
// Callers may hold many and let go of all at once. A loop needs one, or two if it holds one to the next step.
constexpr int64_t kPooledTensorsKept = 2;

// An uninitialised tensor of that type, of one or two dimensions.
Tensor make_tensor(const Tensor& weights, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  const ScalarType type = compute_type(weights);
  size_t bytes = type == ScalarType::Double ? sizeof(double) : sizeof(float);
  for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
  if (bytes < kPooledTensor) return torch::stable::new_empty(weights, sizes, type);
  const std::array<int64_t, 2> strides{sizes.size() == 2 ? sizes[1] : 1, 1};
  return torch::stable::from_blob(cpu::allocate(bytes), sizes, {strides.data(), sizes.size()}, weights.device(), type,
                                  [bytes](void* memory) { cpu::release(memory, bytes, kPooledTensorsKept); });
}

Tensor pooled_forward(Tensor weights, Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags,
                      Tensor row_keys, Tensor row_starts, Tensor flow_starts, Tensor counts,
                      std::optional<Tensor> per_sample_weights, int64_t total_dim, int64_t pooling_mode) {
  cpu::begin_call();
  PlanTensors plan{lookups, bags, row_keys, row_starts, flow_starts, counts};
  const Problem problem =
      read_problem(weights, tables, features, offsets, plan, per_sample_weights, total_dim, pooling_mode);
  Tensor output = make_tensor(weights, {problem.batch.batch_size, total_dim});
  with_type(weights, [&](auto zero) {
    using T = decltype(zero);
    cpu::pooled_forward<T>(torch_threads(), problem.lookup<T>(weights, per_sample_weights),
                           output.mutable_data_ptr<T>());
  });
  return output;
}

// Checks `grad_output` and reads the rest.
Problem read_backward(const Tensor& grad_output, const Tensor& weights, const Tensor& tables, const Tensor& features,
                      const Tensor& offsets, PlanTensors& plan, const std::optional<Tensor>& per_sample_weights,
                      int64_t pooling_mode, bool per_sample_weights_grad) {
  check_shape("grad_output", grad_output, {-1, -1});
  check_type("grad_output", grad_output, compute_type(weights));
  Problem problem =
      read_problem(weights, tables, features, offsets, plan, per_sample_weights, grad_output.size(1), pooling_mode);
  check_shape("grad_output", grad_output, {problem.batch.batch_size, grad_output.size(1)});
  check(!per_sample_weights_grad || per_sample_weights.has_value(),
        "per_sample_weights_grad asks for the gradient of per_sample_weights, but there are none");
  return problem;
}

std::tuple<Tensor, Tensor> pooled_backward(Tensor grad_output, Tensor weights, Tensor tables, Tensor features,
                                           Tensor offsets, Tensor lookups, Tensor bags, Tensor row_keys,
                                           Tensor row_starts, Tensor flow_starts, Tensor counts,
                                           std::optional<Tensor> per_sample_weights, int64_t pooling_mode,
                                           bool per_sample_weights_grad) {
  cpu::begin_call();
  PlanTensors plan{lookups, bags, row_keys, row_starts, flow_starts, counts};
  const Problem problem = read_backward(grad_output, weights, tables, features, offsets, plan, per_sample_weights,
                                        pooling_mode, per_sample_weights_grad);
  Tensor grad_weights = torch::stable::new_zeros(weights, weights.sizes(), compute_type(weights));
  Tensor grad_factors = make_tensor(weights, {per_sample_weights_grad ? lookups.numel() : 0});
  with_type(weights, [&](auto zero) {
    using T = decltype(zero);
    cpu::pooled_backward<T>(torch_threads(), problem.lookup<T>(weights, per_sample_weights),
                            grad_output.const_data_ptr<T>(), cpu::GradientSink<T>(grad_weights.mutable_data_ptr<T>()),
                            per_sample_weights_grad ? grad_factors.mutable_data_ptr<T>() : nullptr);
  });
  return {grad_weights, grad_factors};
}

// The momentum's elements, checked; null if the optimizer has none.
template <class T>
T* momentum_data(const char* name, std::optional<Tensor>& momentum, int64_t size, const Tensor& weights) {
  if (!momentum) return nullptr;
  check_shape(name, *momentum, {size});
  check_type(name, *momentum, compute_type(weights));
  return momentum->mutable_data_ptr<T>();
}

Tensor pooled_backward_update(Tensor grad_output, Tensor weights, std::optional<Tensor> momentum1,
                              std::optional<Tensor> momentum2, Tensor tables, Tensor features, Tensor offsets,
                              Tensor lookups, Tensor bags, Tensor row_keys, Tensor row_starts, Tensor flow_starts,
                              Tensor counts, std::optional<Tensor> per_sample_weights, int64_t pooling_mode,
                              bool per_sample_weights_grad, int64_t optimizer, double learning_rate, double eps,
                              double weight_decay, double beta1, double beta2, std::optional<Tensor> steps,
                              int64_t rounding_seed) {
  cpu::begin_call();
  PlanTensors plan{lookups, bags, row_keys, row_starts, flow_starts, counts};
  const Problem problem = read_backward(grad_output, weights, tables, features, offsets, plan, per_sample_weights,
                                        pooling_mode, per_sample_weights_grad);
  const Optimizer kind = read_optimizer(optimizer, beta1, beta2);
  const MomentumSizes sizes = momentum_sizes(kind, momentum1, momentum2, weights.numel(), problem.tables);
  Tensor grad_factors = make_tensor(weights, {per_sample_weights_grad ? lookups.numel() : 0});
  with_type(weights, [&](auto zero) {
    using T = decltype(zero);
    auto rules = update_rules<T>(kind, learning_rate, eps, weight_decay, beta1, beta2,
                                 read_steps(steps, kind, problem.tables.size()), rounding_seed);
    const cpu::GradientSink<T> sink(cpu::kernels<T>(), std::move(rules), mutable_weights<T>(weights),
                                    momentum_data<T>("momentum1", momentum1, sizes.first, weights),
                                    momentum_data<T>("momentum2", momentum2, sizes.second, weights));
    cpu::pooled_backward<T>(torch_threads(), problem.lookup<T>(weights, per_sample_weights),
                            grad_output.const_data_ptr<T>(), sink,
                            per_sample_weights_grad ? grad_factors.mutable_data_ptr<T>() : nullptr);
  });
  return grad_factors;
}

// Until it is called again, CPU ops add the seconds of their stages to `seconds`. For ops on one thread at a time.
void record_cpu_stages(std::optional<Tensor> seconds) {
  if (seconds) {
    check_shape("seconds", *seconds, {cpu::kNumStages});
    check_type("seconds", *seconds, ScalarType::Double);
  }
  recorded_stages = seconds;
}

void release_memory() { cpu::release_kept(); }

int64_t kept_bytes() { return cpu::kept_bytes(); }

std::string cpu_isa() { return cpu::instruction_set().name; }

// The GPUs that there is code for, "" for none.
std::string cuda_architectures() {
#ifdef FLOWTT_CUDA
  return FLOWTT_CUDA;
#else
  return "";
#endif
}

}  // namespace
}  // namespace flowtt

STABLE_TORCH_LIBRARY(flowtt, m) {
  flowtt::define_ops(m);
  m.def("cpu_isa() -> str");
  m.def("record_cpu_stages(Tensor? seconds) -> ()");  // for benchmarks
  m.def("cuda_architectures() -> str");
  m.def("release_memory() -> ()");  // scratch of CPU ops that is kept for later calls
  m.def("kept_bytes() -> int");     // how much that is
}

STABLE_TORCH_LIBRARY_IMPL(flowtt, CPU, m) { FLOWTT_IMPLEMENT_OPS(m); }

STABLE_TORCH_LIBRARY_IMPL(flowtt, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&flowtt::cpu_isa));
  m.impl("record_cpu_stages", TORCH_BOX(&flowtt::record_cpu_stages));
  m.impl("cuda_architectures", TORCH_BOX(&flowtt::cuda_architectures));
  m.impl("release_memory", TORCH_BOX(&flowtt::release_memory));
  m.impl("kept_bytes", TORCH_BOX(&flowtt::kept_bytes));
}

#ifndef FLOWTT_CUDA
namespace flowtt {
namespace {

void no_cuda_kernels(StableIValue*, uint64_t, uint64_t) {
  throw std::runtime_error(
      "this build of the FlowTT ops has no CUDA kernels: build it where nvcc is, with FLOWTT_BUILD_CUDA=1, or keep the "
      "tables on the CPU");
}

}  // namespace
}  // namespace flowtt

STABLE_TORCH_LIBRARY_IMPL(flowtt, CUDA, m) {
  for (const char* op : {"flow_plan", "check_plan", "pooled_forward", "pooled_backward", "pooled_backward_update"}) {
    m.impl(op, &flowtt::no_cuda_kernels);
  }
}
#endif
