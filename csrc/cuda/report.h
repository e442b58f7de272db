#pragma once

#include "cuda/launch.h"
#include "flowtt/device_batch.cuh"

namespace flowtt::cuda {

// Tells the host of a batch that cannot be taken, for raise_fault, and marks it in `faults`.
void report(const DeviceBatch& batch, const void* indices, bool wide_indices, BoundsCheckMode mode,
            const std::string* table_names, BatchFaults* faults, const Context& context);

// Writes the counts of a plan that passed its check, and of another those of a plan without rows, and tells the host.
void write_counts(const DevicePlan& plan, const unsigned* wrong, int64_t* checked, const Context& context);

}  // namespace flowtt::cuda
