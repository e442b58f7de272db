#include "cuda/setting.h"
#include "flowtt/forward.cuh"

namespace flowtt::cuda {

size_t forward_shared_bytes(const SharedSizes& sizes, int element_bytes) {
  return element_bytes == 4 ? ForwardShared<float>(sizes).bytes : ForwardShared<Bfloat16>(sizes).bytes;
}

Handover make_handover(const Setting& setting, Waves waves, const Context& context) {
  const int64_t tiles = (waves.rows + setting.tile_rows - 1) / setting.tile_rows;
  if (!context.mapping.handover || tiles < 2) return {};
  int stride = 0;
  for (const DeviceTable& t : setting.tables) stride = std::max(stride, t.left_rows * t.slab_q * t.rank4);
  const auto slots = static_cast<int>(tiles * setting.slabs);
  auto* const states = allocate<unsigned>(context, "states of handed-over products", slots);
  return {allocate<float>(context, "handed-over products", int64_t{slots} * stride), states, stride, slots};
}

void make_rows(const Setting& setting, const DeviceBatch& batch, const DevicePlan& wave, Waves waves,
               const Handover& handover, const Weights& weights, float* rows, const Context& context) {
  if (handover.states != nullptr) {  // [mutant: earlier-wave]
    const size_t bytes = static_cast<size_t>(handover.slots) * sizeof *handover.states;
    check(cudaMemsetAsync(handover.states, 0, bytes, context.stream), "memset");
  }
  with_elements(weights, [&](auto* elements) {
    using Element = std::remove_pointer_t<decltype(elements)>;
    const auto kernel = forward_rows<Element>;
    const unsigned grid = persistent_grid(kernel, setting, waves.rows);
    const Schedule schedule = share(setting, wave, grid, handover.states != nullptr ? 1 : 0, context);
    const ForwardArguments<Element> arguments{batch,        wave,     schedule, handover,          setting.sizes,
                                              context.tf32, elements, rows,     setting.row_stride};
    check(FLOWTT_LAUNCH(kernel, grid, kThreads, setting.shared_bytes, context.stream, arguments), "forward_rows");
  });
}

}  // namespace flowtt::cuda
