// Gradients of the cores whose slices have no single task of their own: each task sums its own, for the slices that it
// touches.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/kernels.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// How the gradient of an outer core's slice lies in a buffer: [rows, columns_padded], of which `columns` are the
// slice's, transposed if the slice is the last core's. With it, for the cores whose slices backward reads transposed, a
// copy of the slice in that form.
struct OuterCore {
  int core;
  int64_t rows, columns, columns_padded;
  bool transposed;
  int64_t copy_size;

  int64_t gradient_size() const { return rows * columns_padded; }
  int64_t stride() const { return gradient_size() + copy_size; }

  // From the form in buffers to that of the slice; `gradient` and `slice` do not overlap.
  template <class T>
  void to_slice(const Kernels<T>& kernels, const T* gradient, T* slice) const {
    if (transposed) {
      kernels.transpose(rows, columns, gradient, columns_padded, slice, rows);
      return;
    }
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(gradient + i * columns_padded, columns, slice + i * columns);
    }
  }
};

// The outer cores of a table: the last, and those before the middle one.
class OuterCores {
 public:
  OuterCores(const Table& table, const Geometry& g) {
    cores_[size_++] = {table.last(), g.q, g.rank, g.rank_padded, true, g.last_size()};
    if (g.two_cores) return;
    if (!g.four_cores) {
      cores_[size_++] = {0, g.left_rows, g.left_rank, g.left_rank_padded, false, 0};
      return;
    }
    cores_[size_++] = {0, table.q[0], table.r[1], g.first_rank_padded, false, 0};
    cores_[size_++] = {1,           table.r[1] * table.q[1],
                       g.left_rank, g.left_rank_padded,
                       false,       table.q[1] * g.left_rank_padded * g.first_rank_padded};
  }

  int size() const { return size_; }
  const OuterCore& operator[](int i) const { return cores_[i]; }
  static constexpr int kLast = 0, kFirst = 1, kSecond = 2;  // their order

 private:
  std::array<OuterCore, kMaxCores - 1> cores_;
  int size_ = 0;
};

// What a task holds of the slices of one core that it touches.
template <class T>
class TouchedSlices {
 public:
  TouchedSlices() = default;
  // For a core of `p` slices of which at most `most` will be touched, `stride` elements each. The memory is `arena`'s.
  TouchedSlices(Arena* arena, int64_t p, int64_t most, int64_t stride)
      : places_(arena->take<int32_t>(p)), data_(arena->take<T>(std::min(p, most) * stride)), stride_(stride) {
    std::fill_n(places_, p, kUntouched);
  }

  struct Found {
    T* data;       // [stride]
    bool touched;  // before; if not, nothing is there yet
  };
  Found touch(int64_t slice) {
    const bool touched = places_[slice] != kUntouched;
    if (!touched) places_[slice] = count_++;
    return {data_ + places_[slice] * stride_, touched};
  }

  // Null if untouched.
  const T* find(int64_t slice) const {
    return places_[slice] == kUntouched ? nullptr : data_ + places_[slice] * stride_;
  }

 private:
  static constexpr int32_t kUntouched = -1;

  int32_t* places_ = nullptr;  // [p] number of each slice among those that are touched
  T* data_ = nullptr;
  int64_t stride_ = 0;
  int32_t count_ = 0;
};

// What a task holds of a table, in the order of OuterCores.
template <class T>
using OuterGradients = std::array<TouchedSlices<T>, kMaxCores - 1>;

}  // namespace flowtt::cpu
