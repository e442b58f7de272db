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
  const auto pool = [&](const DevicePlan& wave, unsigned grid, const int32_t* row_of_lookup, const float* rows) {
    check(FLOWTT_LAUNCH(pool_rows, grid, kThreads, 0, context.stream, device, wave, device_pooling(pooling),
                        row_of_lookup, rows, setting.row_stride, output),
          "pool_rows");
  };
  if (batch.num_lookups == 0) return pool(on_device, blocks_for(bags, kWarps), nullptr, nullptr);
  const int32_t* const row_of_lookup = number_lookups(on_device, batch.num_lookups, context);
  const Waves waves = choose_waves(setting, batch.num_lookups, context);
  auto* const rows = allocate<float>(context, "rows", int64_t{waves.rows} * setting.row_stride);
  const Handover handover = make_handover(setting, waves, context);
  // Where there are several waves, most may be empty: no more blocks than see that quickly.
  const auto few = static_cast<unsigned>(16 * multiprocessors());
  const unsigned grid = waves.count == 1 ? blocks_for(bags, kWarps) : std::min(blocks_for(bags, kWarps), few);
  for (const DevicePlan& wave : cut(on_device, waves, context)) {
    make_rows(setting, device, wave, waves, handover, weights, rows, context);
    pool(wave, grid, row_of_lookup, rows);
  }
}

}  // namespace flowtt::cuda
