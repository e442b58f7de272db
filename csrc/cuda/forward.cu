#include "cuda/setting.h"
#include "flowtt/pooling.cuh"

namespace flowtt::cuda {

void pooled_forward(const HostBatch& batch, const PlanPointers& plan, const Weights& weights,
                    const PoolingArguments& pooling, float* output, const Context& context) {
  const int64_t bags = batch.num_features * batch.batch_size;
  if (bags == 0) return;
  const Setting setting = choose_setting(batch.tables, weights.element_bytes(), Direction::kForward, shared_limit());
  const DeviceBatch device = upload(batch, setting.tables, context);
  const DevicePlan on_device = device_plan(plan);
  const bool has_rows = batch.num_lookups > 0;
  const int32_t* const row_of_lookup = has_rows ? number_lookups(on_device, batch.num_lookups, context) : nullptr;
  const float* const rows = has_rows ? make_rows(setting, device, on_device, weights, context) : nullptr;
  check(FLOWTT_LAUNCH(pool_rows, blocks_for(bags, kWarps), kThreads, 0, context.stream, device, device_pooling(pooling),
                      row_of_lookup, rows, setting.row_stride, output),
        "pool_rows");
}

}  // namespace flowtt::cuda
