// What becomes of the gradient of a slice.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Takes each slice's whole gradient once: kept for another optimizer, or applied on the spot.
template <class T>
class GradientSink {
 public:
  // Writes gradients to `grad_weights` [num_parameters].
  explicit GradientSink(T* grad_weights) : grad_weights_(grad_weights) {}

  // Updates `weights` [num_parameters]. `momentum` is [num_parameters] for Adagrad, [num_slices] for row-wise Adagrad.
  GradientSink(const Kernels<T>& kernels, const UpdateRule<T>& rule, T* weights, T* momentum)
      : kernels_(&kernels), rule_(rule), weights_(weights), momentum_(momentum) {}

  // `gradient` is [r_{k-1}, q_k, r_k] as the slice itself.
  void take(const Table& table, int core, int64_t slice, const T* gradient) const {
    const int64_t size = table.slice_size(core);
    const int64_t at = table.core_offset[core] + slice * size;
    if (grad_weights_ != nullptr) {
      std::copy(gradient, gradient + size, grad_weights_ + at);
      return;
    }
    T* momentum = nullptr;
    if (rule_.kind == UpdateRule<T>::kAdagrad) momentum = momentum_ + at;
    if (rule_.kind == UpdateRule<T>::kRowwiseAdagrad) momentum = momentum_ + table.slice_offset[core] + slice;
    kernels_->update(rule_, size, gradient, weights_ + at, momentum);
  }

 private:
  T* grad_weights_ = nullptr;
  const Kernels<T>* kernels_ = nullptr;
  UpdateRule<T> rule_{};
  T* weights_ = nullptr;
  T* momentum_ = nullptr;
};

}  // namespace flowtt::cpu
