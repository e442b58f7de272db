#include "cuda/setting.h"
#include "flowtt/forward.cuh"

namespace flowtt::cuda {

size_t forward_shared_bytes(const SharedSizes& sizes) { return ForwardShared(sizes).bytes; }

float* make_rows(const Setting& setting, const DeviceBatch& batch, const DevicePlan& plan, const float* weights,
                 const Context& context) {
  auto* const rows = allocate<float>(context, "rows", int64_t{batch.num_lookups} * setting.row_stride);
  const unsigned grid = persistent_grid(forward_rows, setting, batch.num_lookups);
  const Schedule schedule = share(setting, plan, grid, context);
  const ForwardArguments arguments{batch, plan, schedule, setting.sizes, weights, rows, setting.row_stride};
  check(FLOWTT_LAUNCH(forward_rows, grid, kThreads, setting.shared_bytes, context.stream, arguments), "forward_rows");
  return rows;
}

}  // namespace flowtt::cuda
