#include "cuda/setting.h"
#include "flowtt/forward.cuh"

namespace flowtt::cuda {

size_t forward_shared_bytes(const SharedSizes& sizes, int element_bytes) {
  return element_bytes == 4 ? ForwardShared<float>(sizes).bytes : ForwardShared<Bfloat16>(sizes).bytes;
}

namespace {

// A slot for each slab of a tile, or null where there is nothing to hand over.
Checkpoints make_checkpoints(const Setting& setting, int64_t num_lookups, const Context& context) {
  const int64_t tiles = (num_lookups + setting.tile_rows - 1) / setting.tile_rows, slots = tiles * setting.slabs;
  if (!context.mapping.checkpoint || tiles < 2) return {};
  int stride = 0;
  for (const DeviceTable& t : setting.tables) stride = std::max(stride, t.left_rows * t.slab_q * t.rank4);
  auto* const states = allocate<unsigned>(context, "states of checkpoints", slots);
  check(cudaMemsetAsync(states, 0, static_cast<size_t>(slots) * sizeof *states, context.stream), "memset");
  return {allocate<float>(context, "checkpoints", slots * stride), states, stride};
}

}  // namespace

float* make_rows(const Setting& setting, const DeviceBatch& batch, const DevicePlan& plan, const Weights& weights,
                 const Context& context) {
  auto* const rows = allocate<float>(context, "rows", int64_t{batch.num_lookups} * setting.row_stride);
  const Checkpoints checkpoints = make_checkpoints(setting, batch.num_lookups, context);
  with_elements(weights, [&](auto* elements) {
    using Element = std::remove_pointer_t<decltype(elements)>;
    const auto kernel = forward_rows<Element>;
    const unsigned grid = persistent_grid(kernel, setting, batch.num_lookups);
    const Schedule schedule = share(setting, plan, grid, checkpoints.states != nullptr ? 1 : 0, context);
    const ForwardArguments<Element> arguments{batch,        plan,     schedule, checkpoints,       setting.sizes,
                                              context.tf32, elements, rows,     setting.row_stride};
    check(FLOWTT_LAUNCH(kernel, grid, kThreads, setting.shared_bytes, context.stream, arguments), "forward_rows");
  });
  return rows;
}

}  // namespace flowtt::cuda
