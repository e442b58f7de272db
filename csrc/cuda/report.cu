#include <map>
#include <mutex>
#include <new>

#include "cuda/report.h"
#include "cuda/setting.h"
#include "flowtt/faults.cuh"

namespace flowtt::cuda {
namespace {

std::mutex mutex;
std::map<int, FaultRecord*> records;  // by device; kept, as captured graphs may write to them at any time

// Of the current device.
FaultRecord& fault_record() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  FaultRecord*& record = records[device];
  if (record == nullptr) {
    void* data = nullptr;
    auto mode = cudaStreamCaptureModeRelaxed;  // a graph may be being captured
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const cudaError_t error = cudaHostAlloc(&data, sizeof(FaultRecord), cudaHostAllocMapped | cudaHostAllocPortable);
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check(error, "cudaHostAlloc");
    record = new (data) FaultRecord{};
  }
  return *record;
}

}  // namespace

void report(const DeviceBatch& batch, const void* indices, bool wide_indices, BoundsCheckMode mode,
            const std::string* table_names, BatchFaults* faults, const Context& context) {
  const std::lock_guard<std::mutex> lock(mutex);
  check(FLOWTT_LAUNCH(report_faults, 1, 1, 0, context.stream, batch, indices, wide_indices, mode, table_names, faults,
                      &fault_record()),
        "report_faults");
}

void write_counts(const DevicePlan& plan, const unsigned* wrong, int64_t* checked, const Context& context) {
  const std::lock_guard<std::mutex> lock(mutex);
  check(FLOWTT_LAUNCH(write_checked_counts, 1, 1, 0, context.stream, plan, wrong, checked, &fault_record()),
        "write_checked_counts");
}

void raise_fault() {
  std::unique_lock<std::mutex> lock(mutex);
  FaultRecord& record = fault_record();
  if (__atomic_load_n(&record.state, __ATOMIC_ACQUIRE) != FaultRecord::kWritten) return;
  const BatchError error = record.error;
  const auto* const table_names = static_cast<const std::string*>(record.table_names);
  __atomic_store_n(&record.state, unsigned{FaultRecord::kFree}, __ATOMIC_RELEASE);  // [mutant: repeated-fault]
  lock.unlock();
  raise_batch_error(
      error, table_names == nullptr ? "" : *table_names,
      ". The GPU found this in this batch or an earlier one; CUDA_LAUNCH_BLOCKING=1 makes the lookup itself "
      "say so");
}

}  // namespace flowtt::cuda
