// The cores as they are stored: in the type that is computed with, or in 16 bits, widened when they are read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/kernels.h"
#include "cpu/prefetch.h"

namespace flowtt::cpu {

template <class T>
class Weights {
 public:
  explicit Weights(const T* data) : data_(data) {}
  // In 16 bits; `tiles` for bfloat16 where there are some, else null.
  Weights(const uint16_t* data, const ReducedKernels<T>& kernels, const TileKernels<T>* tiles)
      : reduced_data_(data), reduced_(&kernels), tiles_(tiles) {}

  bool reduced() const { return reduced_ != nullptr; }
  // The kernels that multiply slices of a table as they are stored; null if slices are to be widened.
  const TileKernels<T>* tiles(const Geometry& g) const {
    if (tiles_ == nullptr || g.two_cores || g.four_cores || g.rank != g.rank_padded) return nullptr;
    if (g.left_rows > TileKernels<T>::kRows || !tiles_->fits(g.left_rank, g.middle_columns)) return nullptr;
    return tiles_;
  }
  const uint16_t* reduced_data() const { return reduced_data_; }

  int64_t element_size() const { return reduced() ? sizeof(uint16_t) : sizeof(T); }

  // Elements [at, at + n): where they are, or widened in `spare` [n].
  const T* read(int64_t at, int64_t n, T* spare) const {
    if (!reduced()) return data_ + at;
    reduced_->widen(n, reduced_data_ + at, spare);
    return spare;
  }
  void copy(int64_t at, int64_t n, T* to) const {
    if (reduced()) {
      reduced_->widen(n, reduced_data_ + at, to);
    } else {
      std::copy_n(data_ + at, n, to);
    }
  }

  FLOWTT_PREFETCHING void prefetch(int64_t at, int64_t n) const {
    reduced() ? cpu::prefetch(reduced_data_ + at, n) : cpu::prefetch(data_ + at, n);
  }
  FLOWTT_PREFETCHING void prefetch_far(int64_t at, int64_t n) const {
    reduced() ? cpu::prefetch_far(reduced_data_ + at, n) : cpu::prefetch_far(data_ + at, n);
  }

 private:
  const T* data_ = nullptr;
  const uint16_t* reduced_data_ = nullptr;
  const ReducedKernels<T>* reduced_ = nullptr;
  const TileKernels<T>* tiles_ = nullptr;
};

// Cores that an optimizer changes.
template <class T>
class MutableWeights {
 public:
  MutableWeights() = default;
  explicit MutableWeights(T* data) : data_(data) {}
  MutableWeights(uint16_t* data, const ReducedKernels<T>& kernels) : reduced_data_(data), reduced_(&kernels) {}

  // Calls body(T* elements) with the elements [at, at + n), to be changed.
  template <class Body>
  void change(int64_t at, int64_t n, int64_t rounding_seed, const Body& body) const {
    if (reduced_ == nullptr) return body(data_ + at);
    constexpr int64_t kSmall = 1024;
    alignas(kAlignment) T small[kSmall];
    const Buffer<T> large(n > kSmall ? static_cast<size_t>(n) : 0);
    T* wide = n > kSmall ? large.data() : small;
    reduced_->widen(n, reduced_data_ + at, wide);
    body(wide);
    reduced_->round(n, wide, rounding_seed, at, reduced_data_ + at);
  }

 private:
  T* data_ = nullptr;
  uint16_t* reduced_data_ = nullptr;
  const ReducedKernels<T>* reduced_ = nullptr;
};

}  // namespace flowtt::cpu
