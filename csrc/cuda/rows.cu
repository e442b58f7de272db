#include "cuda/setting.h"
#include "flowtt/forward.cuh"

namespace flowtt::cuda {

size_t forward_shared_bytes(const SharedSizes& sizes) { return ForwardShared(sizes).bytes; }

namespace {

// A slot for each tile, or null where there is nothing to hand over.
Checkpoints make_checkpoints(const Setting& setting, int64_t num_lookups, const Context& context) {
  const int64_t tiles = (num_lookups + setting.tile_rows - 1) / setting.tile_rows;
  if (!context.mapping.checkpoint || tiles < 2) return {};
  int stride = 0;
  for (const DeviceTable& t : setting.tables) stride = std::max(stride, t.left_rows * t.owner_q * t.rank4);
  auto* const states = allocate<unsigned>(context, "states of checkpoints", tiles);
  check(cudaMemsetAsync(states, 0, static_cast<size_t>(tiles) * sizeof *states, context.stream), "memset");
  return {allocate<float>(context, "checkpoints", tiles * stride), states, stride};
}

}  // namespace

float* make_rows(const Setting& setting, const DeviceBatch& batch, const DevicePlan& plan, const float* weights,
                 const Context& context) {
  auto* const rows = allocate<float>(context, "rows", int64_t{batch.num_lookups} * setting.row_stride);
  const unsigned grid = persistent_grid(forward_rows, setting, batch.num_lookups);
  const Checkpoints checkpoints = make_checkpoints(setting, batch.num_lookups, context);
  const Schedule schedule = share(setting, plan, grid, checkpoints.states != nullptr ? 1 : 0, context);
  const ForwardArguments arguments{batch,         plan,    schedule, checkpoints,
                                   setting.sizes, weights, rows,     setting.row_stride};
  check(FLOWTT_LAUNCH(forward_rows, grid, kThreads, setting.shared_bytes, context.stream, arguments), "forward_rows");
  return rows;
}

}  // namespace flowtt::cuda
