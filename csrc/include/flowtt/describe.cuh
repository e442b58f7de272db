// Descriptors to the device, as kernel arguments: no copy from host memory that a stream would have to wait for, and a
// captured graph holds them.
#pragma once

#include "flowtt/device_table.h"
#include "flowtt/platform.cuh"

namespace flowtt {

// A piece of a descriptor array; CUDA passes up to 32,764 bytes of arguments.
struct DescriptorPiece {
  static constexpr int kWords = 8000;
  uint32_t words[kWords];
};

__global__ void write_descriptors(const __grid_constant__ DescriptorPiece piece, uint32_t* to, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) to[i] = piece.words[i];
}

}  // namespace flowtt
