// In a file of its own: printf needs a stack, which no other kernel may have.
#include "cuda/report.h"
#include "cuda/setting.h"
#include "flowtt/faults.cuh"

namespace flowtt::cuda {

void report(const DeviceBatch& batch, const void* indices, bool wide_indices, BoundsCheckMode mode,
            const BatchFaults* faults, const Context& context) {
  check(FLOWTT_LAUNCH(report_faults, 1, 1, 0, context.stream, batch, indices, wide_indices, mode, faults),
        "report_faults");
}

}  // namespace flowtt::cuda
