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
  Weights(const uint16_t* data, const NarrowKernels<T>& kernels, const TileKernels<T>* tiles)
      : narrow_data_(data), narrow_(&kernels), tiles_(tiles) {}

  bool narrow() const { return narrow_ != nullptr; }
  // The kernels that multiply slices of a table as they are stored; null if slices are to be widened.
  const TileKernels<T>* tiles(const Geometry& g) const {
    if (tiles_ == nullptr || g.two_cores || g.four_cores || g.rank != g.rank_padded) return nullptr;
    if (g.left_rows > TileKernels<T>::kRows || !tiles_->fits(g.left_rank, g.owner_columns)) return nullptr;
    return tiles_;
  }
  const uint16_t* narrow_data() const { return narrow_data_; }

  int64_t element_size() const { return narrow() ? sizeof(uint16_t) : sizeof(T); }

  // Elements [at, at + n): where they are, or widened in `spare` [n].
  const T* read(int64_t at, int64_t n, T* spare) const {
    if (!narrow()) return data_ + at;
    narrow_->widen(n, narrow_data_ + at, spare);
    return spare;
  }
  void copy(int64_t at, int64_t n, T* to) const {
    if (narrow()) {
      narrow_->widen(n, narrow_data_ + at, to);
    } else {
      std::copy_n(data_ + at, n, to);
    }
  }

  FLOWTT_PREFETCHING void prefetch(int64_t at, int64_t n) const {
    narrow() ? cpu::prefetch(narrow_data_ + at, n) : cpu::prefetch(data_ + at, n);
  }
  FLOWTT_PREFETCHING void prefetch_far(int64_t at, int64_t n) const {
    narrow() ? cpu::prefetch_far(narrow_data_ + at, n) : cpu::prefetch_far(data_ + at, n);
  }

 private:
  const T* data_ = nullptr;
  const uint16_t* narrow_data_ = nullptr;
  const NarrowKernels<T>* narrow_ = nullptr;
  const TileKernels<T>* tiles_ = nullptr;
};

// Cores that an optimizer changes.
template <class T>
class MutableWeights {
 public:
  MutableWeights() = default;
  explicit MutableWeights(T* data) : data_(data) {}
  MutableWeights(uint16_t* data, const NarrowKernels<T>& kernels) : narrow_data_(data), narrow_(&kernels) {}

  // Calls body(T* elements) with the elements [at, at + n), to be changed.
  template <class Body>
  void change(int64_t at, int64_t n, int64_t rounding_seed, const Body& body) const {
    if (narrow_ == nullptr) return body(data_ + at);
    constexpr int64_t kSmall = 1024;
    alignas(kAlignment) T small[kSmall];
    const Buffer<T> large(n > kSmall ? static_cast<size_t>(n) : 0);
    T* wide = n > kSmall ? large.data() : small;
    narrow_->widen(n, narrow_data_ + at, wide);
    body(wide);
    narrow_->narrow(n, wide, rounding_seed, at, narrow_data_ + at);
  }

 private:
  T* data_ = nullptr;
  uint16_t* narrow_data_ = nullptr;
  const NarrowKernels<T>* narrow_ = nullptr;
};

}  // namespace flowtt::cpu
