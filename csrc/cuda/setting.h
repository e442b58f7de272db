// What launches have in common: descriptors on the device, sizes of grids and of shared memory.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "flowtt/device_batch.cuh"
#include "flowtt/element.cuh"

namespace flowtt::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("flowtt: ") + what + ": " + cudaGetErrorString(error));
}

inline unsigned blocks_for(int64_t items, int64_t each = kThreads) {
  return static_cast<unsigned>((items + each - 1) / each);
}

template <class T>
T* allocate(const Context& context, const char* name, int64_t count) {
  return static_cast<T*>(context.allocate(name, static_cast<size_t>(count) * sizeof(T)));
}

inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// The most shared memory that a block may have.
inline size_t shared_limit() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return static_cast<size_t>(bytes);
}

// How the tables of a batch are worked on: the same for forward and backward of equal tables.
struct Setting {
  std::vector<DeviceTable> tables;
  SharedSizes sizes;
  size_t shared_bytes;
  int tile_rows;
  int slab;        // kSmallSlab or kLargeSlab
  int slabs;       // of the largest middle slice
  int row_stride;  // of rows and of their gradients
  int64_t num_parameters, num_slices;
  int row_cost, flow_cost;
};

Setting choose_setting(const std::vector<Table>& tables, int element_bytes, Direction direction, size_t limit);

// To device memory, as kernel arguments; whole words.
void write(const void* data, size_t bytes, void* to, const Context& context);

// Descriptors on the device, and the rest of what kernels know of a batch.
DeviceBatch upload(const HostBatch& batch, const std::vector<DeviceTable>& tables, const Context& context);

// Blocks that fit on the device at once, and shares of the tiles for them.
template <class Kernel>
unsigned persistent_grid(Kernel kernel, const Setting& setting, int64_t num_rows) {
  int each = 0;
  const void* const function = reinterpret_cast<const void*>(kernel);
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(setting.shared_bytes)),
        "cudaFuncSetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, function, kThreads, setting.shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t tiles = (num_rows + setting.tile_rows - 1) / setting.tile_rows * setting.slabs;
  return static_cast<unsigned>(std::min<int64_t>(int64_t{multiprocessors()} * std::max(each, 1), tiles));
}

// `leave`: tiles of a range that no thief takes.
Schedule share(const Setting& setting, const DevicePlan& plan, unsigned blocks, int leave, const Context& context);

// Distinct row of every lookup.
int32_t* number_lookups(const DevicePlan& plan, int64_t num_lookups, const Context& context);

size_t forward_shared_bytes(const SharedSizes& sizes, int element_bytes);
size_t backward_shared_bytes(const SharedSizes& sizes, int element_bytes);

// How many distinct rows are worked on at a time, and how often.
struct Waves {
  int rows, count;
};

Waves choose_waves(const Setting& setting, int64_t num_lookups, const Context& context);

// The plans of waves, each of at most waves.rows rows. One wave is the plan itself.
std::vector<DevicePlan> cut(const DevicePlan& plan, Waves waves, const Context& context);

// Slots for the flows of a wave, or null where there is nothing to hand over.
Handover make_handover(const Setting& setting, Waves waves, const Context& context);

// rows [waves.rows, row_stride] of one wave.
void make_rows(const Setting& setting, const DeviceBatch& batch, const DevicePlan& wave, Waves waves,
               const Handover& handover, const Weights& weights, float* rows, const Context& context);

// Calls body with the weights' elements.
template <class Body>
void with_elements(const Weights& weights, const Body& body) {
  switch (weights.storage) {
    case Storage::kFloat32:
      return body(static_cast<float*>(weights.data));
    case Storage::kBfloat16:
      return body(static_cast<Bfloat16*>(weights.data));
    case Storage::kFloat16:
      return body(static_cast<Float16*>(weights.data));
    case Storage::kFloat64:
      throw std::runtime_error("flowtt: the CUDA kernels have no float64 cores; use float32");
  }
}

inline DevicePlan device_plan(const PlanPointers& plan) {
  return {plan.lookups, plan.bags, plan.row_keys, plan.row_starts, plan.flow_starts, plan.counts, 0, nullptr};
}

inline Pooling device_pooling(const PoolingArguments& pooling) {
  return {pooling.factors, pooling.mode == PoolingMode::kMean};
}

}  // namespace flowtt::cuda
