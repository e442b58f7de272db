#include "cuda/setting.h"
#include "flowtt/backward.cuh"
#include "flowtt/fixed_point.cuh"
#include "flowtt/row_gradients.cuh"
#include "flowtt/update.cuh"

namespace flowtt::cuda {
namespace {

// Gradients of the distinct rows of a wave, and of the per-sample weights if asked for.
class RowGradients {
 public:
  RowGradients(const HostBatch& batch, const DeviceBatch& device, const DevicePlan& plan, const Weights& weights,
               const Setting& setting, const PoolingArguments& pooling, const BackwardTargets& targets,
               const Context& context)
      : waves(choose_waves(setting, batch.num_lookups, context)),
        plans(cut(plan, waves, context)),
        data(allocate<float>(context, "row gradients", int64_t{waves.rows} * setting.row_stride)),
        weights_(weights),
        targets_(targets),
        context_(context),
        spans_((batch.num_lookups + 31) / 32),
        arguments_{device,
                   plan,
                   device_pooling(pooling),
                   find_spans(plan, batch.num_lookups, spans_, context),
                   targets.grad_output,
                   data,
                   allocate<float>(context, "carries", spans_ * setting.row_stride),
                   setting.row_stride} {
    if (targets.grad_factors == nullptr) return;
    forward_ = choose_setting(batch.tables, weights.element_bytes(), Direction::kForward, shared_limit());
    forward_batch_ = upload(batch, forward_.tables, context);
    handover_ = make_handover(forward_, waves, context);
  }

  void make(const DevicePlan& wave) const {
    RowGradientArguments arguments = arguments_;
    arguments.plan = wave;
    const unsigned grid = blocks_for(spans_, kWarps);
    check(FLOWTT_LAUNCH(sum_row_gradients, grid, kThreads, 0, context_.stream, arguments), "sum_row_gradients");
    for (int stride = 1; spans_ > 32 * stride; stride *= 32) {  // [mutant: missing-level, late-levels]
      check(FLOWTT_LAUNCH(sum_carries, blocks_for(spans_, kWarps * 32 * stride), kThreads, 0, context_.stream,
                          arguments, stride),
            "sum_carries");
    }
    check(FLOWTT_LAUNCH(add_carries, grid, kThreads, 0, context_.stream, arguments), "add_carries");
  }

  // Those of the per-sample weights; the rows take the place of the gradients of rows.
  void make_factors(const DevicePlan& wave) const {
    if (targets_.grad_factors == nullptr) return;
    make_rows(forward_, forward_batch_, wave, waves, handover_, weights_, data, context_);
    RowGradientArguments arguments = arguments_;
    arguments.plan = wave;
    check(FLOWTT_LAUNCH(factor_gradients, blocks_for(spans_, kWarps), kThreads, 0, context_.stream, arguments, data,
                        targets_.grad_factors),
          "factor_gradients");
  }

  const Waves waves;
  const std::vector<DevicePlan> plans;
  float* const data;  // [waves.rows, row_stride]

 private:
  static int32_t* find_spans(const DevicePlan& plan, int64_t num_lookups, int64_t spans, const Context& context) {
    auto* const rows = allocate<int32_t>(context, "rows of spans", spans + 1);
    check(FLOWTT_LAUNCH(find_span_rows, blocks_for(spans + 1), kThreads, 0, context.stream, plan,
                        static_cast<int>(num_lookups), rows),
          "find_span_rows");
    return rows;
  }

  const Weights& weights_;
  const BackwardTargets& targets_;
  const Context& context_;
  const int64_t spans_;
  const RowGradientArguments arguments_;
  Setting forward_{};
  DeviceBatch forward_batch_{};
  Handover handover_{};
};

// What the gradients of rows lead to.
template <class Element>
struct Backward {
  const Setting& setting;
  const DeviceBatch& batch;
  const DevicePlan& plan;
  Element* weights;
  const RowGradients& gradients;
  const Context& context;

  template <class Sum, int SLAB>
  void launch(const DevicePlan& wave, const Sum& sum) const {
    const auto kernel = backward_cores<Element, Sum, SLAB>;
    const unsigned grid = persistent_grid(kernel, setting, gradients.waves.rows);
    const Schedule schedule = share(setting, wave, grid, 0, context);
    const BackwardArguments<Element, Sum> arguments{
        batch, wave, schedule, setting.sizes, context.tf32, weights, gradients.data, setting.row_stride, sum};
    check(FLOWTT_LAUNCH(kernel, grid, kThreads, setting.shared_bytes, context.stream, arguments), "backward_cores");
  }

  template <class Sum>
  void add_to(const Sum& sum) const {
    for (const DevicePlan& wave : gradients.plans) {
      gradients.make_factors(wave);
      gradients.make(wave);
      setting.slab == kSmallSlab ? launch<Sum, kSmallSlab>(wave, sum) : launch<Sum, kLargeSlab>(wave, sum);
    }
  }

  // A sum of zeros, in units that suit this batch.
  FixedSum fixed_sum() const {
    auto* const data = allocate<unsigned long long>(context, "fixed-point gradients", setting.num_parameters);
    auto* const largest = allocate<unsigned>(context, "largest", 2);
    auto* const scale = allocate<float>(context, "scale", 2);
    check(cudaMemsetAsync(data, 0, static_cast<size_t>(setting.num_parameters) * sizeof *data, context.stream),
          "memset");
    check(cudaMemsetAsync(largest, 0, 2 * sizeof *largest, context.stream), "memset");
    const auto grid = static_cast<unsigned>(4 * multiprocessors());
    check(FLOWTT_LAUNCH(largest_weight<Element>, grid, kThreads, 0, context.stream, weights, setting.num_parameters,
                        largest),
          "largest_weight");
    for (const DevicePlan& wave : gradients.plans) {
      gradients.make(wave);
      check(FLOWTT_LAUNCH(largest_row_gradient, grid, kThreads, 0, context.stream, batch, wave, gradients.data,
                          setting.row_stride, largest + 1),
            "largest_row_gradient");
    }
    int path_bits = 0, factors = 0;
    for (const DeviceTable& table : setting.tables) {
      int64_t paths = table.dim;
      for (int k = 1; k < table.num_cores; ++k) paths *= table.r[k];
      path_bits = std::max(path_bits, bits_for(paths));
      factors = std::max(factors, table.num_cores - 1);
    }
    check(FLOWTT_LAUNCH(choose_scale, 1, 1, 0, context.stream, largest, plan, path_bits, factors, scale),
          "choose_scale");
    return {data, scale};
  }
};

template <class Element, class Sum>
void step(const Backward<Element>& backward, const Sum& sum, const Update& update) {
  const Setting& setting = backward.setting;
  const cudaStream_t stream = backward.context.stream;
  auto* const touched = allocate<uint8_t>(backward.context, "touched slices", setting.num_slices);
  check(cudaMemsetAsync(touched, 0, static_cast<size_t>(setting.num_slices), stream), "memset");
  check(FLOWTT_LAUNCH(mark_touched, blocks_for(backward.batch.num_lookups), kThreads, 0, stream, backward.batch,
                      backward.plan, touched),
        "mark_touched");
  auto* const rules =
      allocate<UpdateRule<float>>(backward.context, "update rules", static_cast<int64_t>(update.rules.size()));
  static_assert(sizeof *rules % 4 == 0, "copied in words");
  write(update.rules.data(), update.rules.size() * sizeof *rules, rules, backward.context);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(setting.num_slices, 8 * multiprocessors()));
  const auto kernel = update_slices<Element, Sum>;
  check(FLOWTT_LAUNCH(kernel, grid, kThreads, update_shared_bytes(), stream, backward.batch, touched,
                      setting.num_slices, sum, rules, backward.weights, update.momentum1, update.momentum2),
        "update_slices");
}

}  // namespace

size_t backward_shared_bytes(const SharedSizes& sizes, int element_bytes) {
  return element_bytes == 4 ? BackwardShared<float>(sizes).bytes : BackwardShared<Bfloat16>(sizes).bytes;
}

void pooled_backward(const HostBatch& batch, const PlanPointers& plan, const Weights& weights,
                     const PoolingArguments& pooling, const BackwardTargets& targets, float* grad_weights,
                     const Context& context) {
  const Setting setting = choose_setting(batch.tables, weights.element_bytes(), Direction::kBackward, shared_limit());
  const auto bytes = static_cast<size_t>(setting.num_parameters) * sizeof(float);
  if (batch.num_lookups == 0 || !targets.deterministic) {
    check(cudaMemsetAsync(grad_weights, 0, bytes, context.stream), "memset");
  }
  if (batch.num_lookups == 0) return;
  const DeviceBatch device = upload(batch, setting.tables, context);
  const DevicePlan on_device = device_plan(plan);
  const RowGradients gradients(batch, device, on_device, weights, setting, pooling, targets, context);
  with_elements(weights, [&](auto* elements) {
    const Backward<std::remove_pointer_t<decltype(elements)>> backward{setting,  device,    on_device,
                                                                       elements, gradients, context};
    if (!targets.deterministic) return backward.add_to(FloatSum{grad_weights});
    const FixedSum sum = backward.fixed_sum();
    backward.add_to(sum);
    check(FLOWTT_LAUNCH(to_floats, static_cast<unsigned>(4 * multiprocessors()), kThreads, 0, context.stream, sum,
                        setting.num_parameters, grad_weights),
          "to_floats");
  });
}

void pooled_backward_update(const HostBatch& batch, const PlanPointers& plan, const Weights& weights,
                            const PoolingArguments& pooling, const BackwardTargets& targets, const Update& update,
                            const Context& context) {
  if (batch.num_lookups == 0) return;
  const Setting setting = choose_setting(batch.tables, weights.element_bytes(), Direction::kBackward, shared_limit());
  const DeviceBatch device = upload(batch, setting.tables, context);
  const DevicePlan on_device = device_plan(plan);
  const RowGradients gradients(batch, device, on_device, weights, setting, pooling, targets, context);
  with_elements(weights, [&](auto* elements) {
    const Backward<std::remove_pointer_t<decltype(elements)>> backward{setting,  device,    on_device,
                                                                       elements, gradients, context};
    if (targets.deterministic) {
      const FixedSum sum = backward.fixed_sum();
      backward.add_to(sum);
      return step(backward, sum, update);
    }
    const FloatSum sum{allocate<float>(context, "gradients", setting.num_parameters)};
    check(cudaMemsetAsync(sum.data, 0, static_cast<size_t>(setting.num_parameters) * sizeof(float), context.stream),
          "memset");
    backward.add_to(sum);
    step(backward, sum, update);
  });
}

}  // namespace flowtt::cuda
