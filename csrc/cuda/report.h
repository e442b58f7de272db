#pragma once

#include "cuda/launch.h"
#include "flowtt/device_batch.cuh"

namespace flowtt::cuda {

// Fails, on the device, for a batch with faults that `mode` does not take.
void report(const DeviceBatch& batch, const void* indices, bool wide_indices, BoundsCheckMode mode,
            const BatchFaults* faults, const Context& context);

}  // namespace flowtt::cuda
