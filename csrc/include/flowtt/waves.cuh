// Waves: a part of the distinct rows at a time, so that rows and their gradients need little memory, and stay in L2.
#pragma once

#include "flowtt/bisection.cuh"
#include "flowtt/device_batch.cuh"

namespace flowtt {

constexpr int kWaveCounts = 4;  // rows, flows of these rows, first of these flows, 0

// counts [waves, kWaveCounts], of waves of `wave_rows` rows; a thread a wave.
__global__ void cut_waves(DevicePlan plan, int wave_rows, int waves, int64_t* counts) {
  const int wave = blockIdx.x * kThreads + threadIdx.x;
  if (wave >= waves) return;
  const int64_t num_rows = plan.counts[0], begin = min(int64_t{wave} * wave_rows, num_rows);
  // [mutant: short-waves]
  const int64_t end = min(begin + wave_rows, num_rows);
  const auto flow_of = [&](int64_t row) {  // the last flow that begins at or before it
    return last_where(plan.counts[1], [&](int64_t flow) { return plan.flow_starts[flow] <= row; });
  };
  const int64_t first = end > begin ? flow_of(begin) : 0;
  int64_t* const to = counts + wave * kWaveCounts;
  to[0] = end - begin;
  to[1] = end > begin ? flow_of(end - 1) + 1 - first : 0;
  to[2] = first;
  to[3] = 0;
}

}  // namespace flowtt
