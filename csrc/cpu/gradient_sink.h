// What becomes of the gradient of a slice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/weights.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Takes each slice's whole gradient once: kept for another optimizer, or applied on the spot.
template <class T>
class GradientSink {
 public:
  // Writes gradients to `grad_weights` [num_parameters].
  explicit GradientSink(T* grad_weights) : grad_weights_(grad_weights) {}

  // Updates `weights` [num_parameters], each table by its rule; what is stored in 16 bits is rounded as ReducedKernels
  // say. Momenta that the optimizer has are [num_parameters], but [num_slices] for row-wise Adagrad; others are null.
  GradientSink(const Kernels<T>& kernels, std::vector<UpdateRule<T>> rules, const MutableWeights<T>& weights,
               T* momentum1, T* momentum2)
      : kernels_(&kernels), rules_(std::move(rules)), weights_(weights), momentum1_(momentum1), momentum2_(momentum2) {}

  // `gradient` is [r_{k-1}, q_k, r_k] as the slice itself.
  void take(const Table& table, int core, int64_t slice, const T* gradient) const {
    const int64_t size = table.slice_size(core);
    const int64_t at = table.core_offset[core] + slice * size;
    if (grad_weights_ != nullptr) {
      std::copy(gradient, gradient + size, grad_weights_ + at);
      return;
    }
    const UpdateRule<T>& rule = rules_[static_cast<size_t>(table.number)];
    const bool row_wise = rule.optimizer == Optimizer::kRowwiseAdagrad;
    const int64_t of_momentum1 = row_wise ? table.slice_offset[core] + slice : at;
    weights_.change(at, size, rule.rounding_seed, [&](T* w) {
      kernels_->update(rule, size, gradient, w, offset(momentum1_, of_momentum1), offset(momentum2_, at));
    });
  }

 private:
  static T* offset(T* start, int64_t elements) { return start == nullptr ? nullptr : start + elements; }

  T* grad_weights_ = nullptr;
  const Kernels<T>* kernels_ = nullptr;
  std::vector<UpdateRule<T>> rules_;
  MutableWeights<T> weights_;
  T* momentum1_ = nullptr;
  T* momentum2_ = nullptr;
};

}  // namespace flowtt::cpu
