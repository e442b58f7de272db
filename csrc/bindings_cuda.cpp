// The CUDA kernels behind the ops. Of torch, only the stable ABI. Compiled by the C++ compiler, not by nvcc.
//
// The emulator's build of this file, for tests, defines the same ops for CPU tensors in a namespace of its own.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "arguments.h"
#include "cuda/launch.h"
#include "schemas.h"

#ifdef FLOWTT_CUDA_EMULATION
#include "cuda_emulation.h"
#define FLOWTT_LIBRARY flowtt_emulated
#define FLOWTT_KEY CPU
#else
#define FLOWTT_LIBRARY flowtt
#define FLOWTT_KEY CUDA
#endif

namespace flowtt {
namespace {

std::atomic<bool> deterministic{false}, tf32{false}, by_work{true}, steal{true}, hands_over{true};
std::atomic<int64_t> row_bytes{64 << 20};

#ifdef FLOWTT_CUDA_EMULATION
struct Device {
  explicit Device(const Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
};
#else
// The tensor's device and its current stream, for as long as this object lives.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}

  // torch's function for it is in libtorch_cuda.so, which a CPU-only torch does not have: hence by name.
  cudaStream_t stream() const {
    using Function = AOTITorchError (*)(int32_t, void**);
    static const auto function = [] {
      void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return library == nullptr ? nullptr
                                : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    }();
    check(function != nullptr, "this torch has no CUDA support; install a CUDA build of torch");
    void* stream = nullptr;
    check(function(index_, &stream) == 0, "torch does not say what the current CUDA stream is");
    return static_cast<cudaStream_t>(stream);
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};
#endif

// Tells the emulator's checker which memory the kernels may use.
class Registered {
 public:
  void add([[maybe_unused]] const char* name, [[maybe_unused]] const Tensor& tensor,
           [[maybe_unused]] bool initialised = true) {
#ifdef FLOWTT_CUDA_EMULATION
    const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    cuda_emulation::register_buffer(tensor.data_ptr(), bytes, name, initialised);
    if (!initialised) std::memset(tensor.data_ptr(), 0xff, bytes);
    data_.push_back(tensor.data_ptr());
  }
  Registered() = default;
  Registered(const Registered&) = delete;
  ~Registered() {
    for (const void* data : data_) cuda_emulation::unregister_buffer(data);
  }

 private:
  std::vector<const void*> data_;
#else
  }
#endif
};

// Device memory that lives as long as the op; torch's allocator then keeps it for this stream.
class Workspace {
 public:
  Workspace(const Tensor& like, cudaStream_t stream) : like_(like), stream_(stream) {}

  cuda::Context context() {
    return {[this](const char* name, size_t bytes) {
              tensors_.push_back(torch::stable::new_empty(like_, {static_cast<int64_t>(bytes)}, ScalarType::Byte));
              registered_.add(name, tensors_.back(), false);
#ifdef FLOWTT_CUDA_EMULATION
              cuda_emulation::count(name, bytes);
#endif
              return tensors_.back().data_ptr();
            },
            stream_,
            {by_work, steal, hands_over},
            row_bytes,
            tf32};
  }

 private:
  const Tensor& like_;
  cudaStream_t stream_;
  Registered registered_;
  std::vector<Tensor> tensors_;
};

constexpr Place kDevice = Place::kDevice;

// Table names, kept as long as the process lives: a kernel may refer to them at any time.
const std::string* keep_names(const Tensor& table_names) {
  static std::mutex mutex;
  static std::unordered_set<std::string> kept;
  const std::lock_guard<std::mutex> lock(mutex);
  return &*kept.insert(text_of("table_names", table_names)).first;
}

cuda::HostBatch host_batch(const Tensor& tables, const Tensor& features, const Tensor& offsets, int64_t num_lookups,
                           int64_t total_dim) {
  std::vector<Table> described = read_tables(tables);
  const Batch batch = read_batch(features, offsets, num_lookups, described.size(), kDevice);
  if (total_dim > 0) check_columns(batch, described, total_dim);
  return {std::move(described),     batch.features,       batch.num_features, batch.batch_size,      num_lookups,
          offsets.const_data_ptr(), batch.offsets.wide(), total_dim,          fingerprint_of(tables)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> flow_plan(Tensor tables, Tensor table_names, Tensor features,
                                                                     Tensor indices, Tensor offsets, int64_t flow,
                                                                     int64_t bounds_check_mode) {
  const std::string* const names = keep_names(table_names);
  const Integers rows = integers("indices", indices, kDevice);
  const int64_t n = indices.numel();
  const cuda::HostBatch batch = host_batch(tables, features, offsets, n, 0);
  check(n == 0 || batch.batch_size > 0, "offsets has one entry, so there are no bags for ", n, " indices");
  const Flow how = read_flow(flow);
  const BoundsCheckMode mode = read_bounds_check_mode(bounds_check_mode);
  const Device device(indices);
  cuda::raise_fault();
  Registered registered;
  registered.add("indices", indices);
  registered.add("offsets", offsets);
  PlanTensors plan;
  plan.for_each(n, [&](const char* name, Tensor& tensor, int64_t size, ScalarType type) {
    tensor = torch::stable::new_empty(indices, {size}, type);
    registered.add(name, tensor, false);
  });
  Workspace workspace(indices, device.stream());
  cuda::make_flow_plan(batch, indices.const_data_ptr(), rows.wide(), how, mode, names, plan.buffers(),
                       plan.counts.mutable_data_ptr<int64_t>(), workspace.context());
  return plan.result();
}

// The plan's arrays, checked for what the host can see of them.
cuda::PlanPointers plan_pointers(PlanTensors plan, Registered& registered) {
  plan.for_each(plan.lookups.numel(), [&](const char* name, const Tensor& tensor, int64_t size, ScalarType type) {
    check_type(name, tensor, type);
    check_shape(name, tensor, {size}, kDevice);
    registered.add(name, tensor);
  });
  return {plan.lookups.const_data_ptr<int32_t>(),     plan.bags.const_data_ptr<int32_t>(),
          plan.row_keys.const_data_ptr<int64_t>(),    plan.row_starts.const_data_ptr<int32_t>(),
          plan.flow_starts.const_data_ptr<int32_t>(), plan.counts.const_data_ptr<int64_t>()};
}

Tensor check_plan(Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags, Tensor row_keys,
                  Tensor row_starts, Tensor flow_starts, Tensor counts) {
  const cuda::HostBatch batch = host_batch(tables, features, offsets, lookups.numel(), 0);
  const Device device(counts);
  cuda::raise_fault();
  Registered registered;
  const cuda::PlanPointers plan = plan_pointers({lookups, bags, row_keys, row_starts, flow_starts, counts}, registered);
  registered.add("offsets", offsets);
  Tensor checked = torch::stable::new_empty(counts, {4}, ScalarType::Long);
  registered.add("checked counts", checked, false);
  Workspace workspace(counts, device.stream());
  cuda::check_plan(batch, plan, checked.mutable_data_ptr<int64_t>(), workspace.context());
  return checked;
}

// The arguments that forward and backward share, checked and as pointers.
struct Problem {
  Problem(const Tensor& weights, const Tensor& tables, const Tensor& features, const Tensor& offsets,
          const Tensor& lookups, const Tensor& bags, const Tensor& row_keys, const Tensor& row_starts,
          const Tensor& flow_starts, const Tensor& counts, const std::optional<Tensor>& factors, int64_t total_dim,
          int64_t pooling_mode)
      : batch(host_batch(tables, features, offsets, lookups.numel(), total_dim)) {
    const int64_t n = lookups.numel();
    plan = plan_pointers({lookups, bags, row_keys, row_starts, flow_starts, counts}, registered);
    registered.add("offsets", offsets);
    check_shape("weights", weights, {num_parameters(batch.tables)}, kDevice);
    registered.add("weights", weights);
    cores = {weights.data_ptr(), storage(weights)};
    check(reinterpret_cast<uintptr_t>(weights.const_data_ptr()) % 16 == 0,
          "weights must start at a multiple of 16 bytes; a view into the middle of another tensor may not: clone it");
    weighted = factors.has_value();
    if (weighted) floats("per_sample_weights", *factors, {n});
    pooling = {factors ? static_cast<const float*>(factors->const_data_ptr()) : nullptr,
               read_pooling_mode(pooling_mode)};
  }

  static Storage storage(const Tensor& weights) {
    switch (weights.scalar_type()) {
      case ScalarType::Float:
        return Storage::kFloat32;
      case ScalarType::BFloat16:
        return Storage::kBfloat16;
      case ScalarType::Half:
        return Storage::kFloat16;
      default:
        check(false, "weights must be float32, bfloat16 or float16 on the GPU, not ", name_of(weights.scalar_type()),
              "; float64 runs on the CPU");
        return Storage::kFloat64;
    }
  }

  void floats(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) {
    check(tensor.scalar_type() == ScalarType::Float, name, " must be float32 on the GPU, not ",
          name_of(tensor.scalar_type()));
    check_shape(name, tensor, shape, kDevice);
    registered.add(name, tensor);
  }

  Registered registered;
  cuda::Weights cores;
  cuda::HostBatch batch;
  cuda::PlanPointers plan;
  cuda::PoolingArguments pooling;
  bool weighted;
};

Tensor pooled_forward(Tensor weights, Tensor tables, Tensor features, Tensor offsets, Tensor lookups, Tensor bags,
                      Tensor row_keys, Tensor row_starts, Tensor flow_starts, Tensor counts,
                      std::optional<Tensor> per_sample_weights, int64_t total_dim, int64_t pooling_mode) {
  Problem problem(weights, tables, features, offsets, lookups, bags, row_keys, row_starts, flow_starts, counts,
                  per_sample_weights, total_dim, pooling_mode);
  const Device device(weights);
  cuda::raise_fault();
  Tensor output = torch::stable::new_empty(weights, {problem.batch.batch_size, total_dim}, ScalarType::Float);
  problem.registered.add("output", output, false);
  Workspace workspace(weights, device.stream());
  cuda::pooled_forward(problem.batch, problem.plan, problem.cores, problem.pooling,
                       static_cast<float*>(output.mutable_data_ptr()), workspace.context());
  return output;
}

// Checks what only backward has, and makes the gradient of the per-sample weights.
cuda::BackwardTargets backward_targets(Problem& problem, const Tensor& grad_output, const Tensor& grad_factors,
                                       bool per_sample_weights_grad) {
  problem.floats("grad_output", grad_output, {problem.batch.batch_size, problem.batch.total_dim});
  check(!per_sample_weights_grad || problem.weighted,
        "per_sample_weights_grad asks for the gradient of per_sample_weights, but there are none");
  problem.registered.add("gradient of per_sample_weights", grad_factors, false);
  return {static_cast<const float*>(grad_output.const_data_ptr()),
          per_sample_weights_grad ? static_cast<float*>(grad_factors.mutable_data_ptr()) : nullptr, deterministic};
}

std::tuple<Tensor, Tensor> pooled_backward(Tensor grad_output, Tensor weights, Tensor tables, Tensor features,
                                           Tensor offsets, Tensor lookups, Tensor bags, Tensor row_keys,
                                           Tensor row_starts, Tensor flow_starts, Tensor counts,
                                           std::optional<Tensor> per_sample_weights, int64_t pooling_mode,
                                           bool per_sample_weights_grad) {
  Problem problem(weights, tables, features, offsets, lookups, bags, row_keys, row_starts, flow_starts, counts,
                  per_sample_weights, grad_output.size(1), pooling_mode);
  const Device device(weights);
  cuda::raise_fault();
  Tensor grad_factors =
      torch::stable::new_empty(weights, {per_sample_weights_grad ? lookups.numel() : 0}, ScalarType::Float);
  const cuda::BackwardTargets targets = backward_targets(problem, grad_output, grad_factors, per_sample_weights_grad);
  Tensor grad_weights = torch::stable::new_empty(weights, {weights.numel()}, ScalarType::Float);
  problem.registered.add("gradient of the weights", grad_weights, false);
  Workspace workspace(weights, device.stream());
  cuda::pooled_backward(problem.batch, problem.plan, problem.cores, problem.pooling, targets,
                        static_cast<float*>(grad_weights.mutable_data_ptr()), workspace.context());
  return {grad_weights, grad_factors};
}

// The momentum's elements, checked; null if the optimizer has none.
float* momentum_data(Problem& problem, const char* name, std::optional<Tensor>& momentum, int64_t size) {
  if (!momentum) return nullptr;
  problem.floats(name, *momentum, {size});
  return static_cast<float*>(momentum->mutable_data_ptr());
}

Tensor pooled_backward_update(Tensor grad_output, Tensor weights, std::optional<Tensor> momentum1,
                              std::optional<Tensor> momentum2, Tensor tables, Tensor features, Tensor offsets,
                              Tensor lookups, Tensor bags, Tensor row_keys, Tensor row_starts, Tensor flow_starts,
                              Tensor counts, std::optional<Tensor> per_sample_weights, int64_t pooling_mode,
                              bool per_sample_weights_grad, int64_t optimizer, double learning_rate, double eps,
                              double weight_decay, double beta1, double beta2, std::optional<Tensor> steps,
                              int64_t rounding_seed) {
  Problem problem(weights, tables, features, offsets, lookups, bags, row_keys, row_starts, flow_starts, counts,
                  per_sample_weights, grad_output.size(1), pooling_mode);
  const Optimizer kind = read_optimizer(optimizer, beta1, beta2);
  const MomentumSizes sizes = momentum_sizes(kind, momentum1, momentum2, weights.numel(), problem.batch.tables);
  float* const first = momentum_data(problem, "momentum1", momentum1, sizes.first);
  float* const second = momentum_data(problem, "momentum2", momentum2, sizes.second);
  const Device device(weights);
  cuda::raise_fault();
  Tensor grad_factors =
      torch::stable::new_empty(weights, {per_sample_weights_grad ? lookups.numel() : 0}, ScalarType::Float);
  const cuda::BackwardTargets targets = backward_targets(problem, grad_output, grad_factors, per_sample_weights_grad);
  const auto rules = update_rules<float>(kind, learning_rate, eps, weight_decay, beta1, beta2,
                                         read_steps(steps, kind, problem.batch.tables.size()), rounding_seed);
  const cuda::Update update{rules, first, second};
  Workspace workspace(weights, device.stream());
  cuda::pooled_backward_update(problem.batch, problem.plan, problem.cores, problem.pooling, targets, update,
                               workspace.context());
  return grad_factors;
}

std::tuple<int64_t, int64_t, int64_t> cuda_setting(Tensor tables, bool backward, int64_t shared_limit,
                                                   int64_t element_bytes) {
  check(element_bytes == 4 || element_bytes == 2, "element_bytes must be 4 or 2, not ", element_bytes);
  const cuda::LaunchSize size = cuda::launch_size(read_tables(tables), static_cast<int>(element_bytes), backward,
                                                  static_cast<size_t>(shared_limit));
  return {size.tile_rows, static_cast<int64_t>(size.shared_bytes), size.slab};
}

void raise_cuda_fault() { cuda::raise_fault(); }

void use_deterministic_cuda(bool on) { deterministic = on; }

void use_cuda_tf32(bool on) { tf32 = on; }

void use_cuda_row_bytes(int64_t most) {
  check(most > 0, "rows may take ", most, " bytes; allowed: 1 or more");
  row_bytes = most;
}

void use_cuda_mapping(bool shares_by_work, bool steals, bool handover) {
  by_work = shares_by_work;
  steal = steals;
  hands_over = handover;
}

}  // namespace
}  // namespace flowtt

#ifdef FLOWTT_CUDA_EMULATION
STABLE_TORCH_LIBRARY(flowtt_emulated, m) { flowtt::define_ops(m); }
#endif

STABLE_TORCH_LIBRARY_IMPL(FLOWTT_LIBRARY, FLOWTT_KEY, m) { FLOWTT_IMPLEMENT_OPS(m); }

STABLE_TORCH_LIBRARY_IMPL(FLOWTT_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("raise_cuda_fault", TORCH_BOX(&flowtt::raise_cuda_fault));
  m.impl("cuda_setting", TORCH_BOX(&flowtt::cuda_setting));
  m.impl("use_cuda_row_bytes", TORCH_BOX(&flowtt::use_cuda_row_bytes));
  m.impl("use_cuda_mapping", TORCH_BOX(&flowtt::use_cuda_mapping));
  m.impl("use_deterministic_cuda", TORCH_BOX(&flowtt::use_deterministic_cuda));
  m.impl("use_cuda_tf32", TORCH_BOX(&flowtt::use_cuda_tf32));
}
