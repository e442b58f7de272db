// Prefix products of flows that share a middle slice.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/kernels.h"
#include "cpu/weights.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Rows of `left` whose products with a middle slice are made at once: enough to reuse what is loaded, and few enough
// that the products are still in the first-level cache when their flows' rows are made.
constexpr int64_t kProductRows = 12;

// How many flows' products are made at once.
template <class T>
int64_t flows_at_once(const Weights<T>& weights, const Geometry& geometry) {
  if (weights.tiles(geometry) != nullptr) return TileKernels<T>::kRows / geometry.left_rows;
  return geometry.flows_of_rows(kProductRows);
}

// Makes `left` of up to `left_capacity` flows, and C of up to `c_capacity` of them at a time; see Geometry for what
// they are.
template <class T>
class PrefixProducts {
 public:
  PrefixProducts(const Kernels<T>& kernels, Arena* arena, const Weights<T>& weights, const Table& table,
                 const Geometry& geometry, int64_t left_capacity, int64_t c_capacity)
      : kernels_(kernels), weights_(weights), table_(table), geometry_(geometry), tiles_(weights.tiles(geometry)) {
    if (tiles_ != nullptr) {
      constexpr int64_t kRows = TileKernels<T>::kRows;
      left_pitch_ = (geometry.left_rank + 31) / 32 * 32;
      reduced_left_ = arena->take<uint16_t>(kRows * left_pitch_);
      std::fill_n(reduced_left_, kRows * left_pitch_, uint16_t{0});
      packed_pairs_ = arena->take<uint32_t>(left_pitch_ / 2 * geometry.middle_columns);
      std::fill_n(packed_pairs_, left_pitch_ / 2 * geometry.middle_columns, 0u);
      c_ = arena->take<T>(kRows * geometry.middle_columns);
      return;
    }
    left_ = arena->take<T>(geometry.two_cores ? 0 : left_capacity * geometry.left_size());
    c_ = arena->take<T>(geometry.two_cores ? 0 : c_capacity * geometry.c_size());
    if (weights.reduced() || geometry.rank != geometry.rank_padded) packed_ = arena->take<T>(geometry.middle_size());
    if (weights.reduced() && geometry.four_cores) {
      first_ = arena->take<T>(table.slice_size(0));
      second_ = arena->take<T>(table.slice_size(1));
    }
  }

  // Makes the middle slice of `key` current, for `flows` flows; that of `next_key` will follow, or none if it is
  // negative.
  void set_middle(int64_t key, int64_t flows, int64_t next_key) {
    const int64_t at = slice_of(key, table_.middle()), size = table_.slice_size(table_.middle());
    next_middle_ = next_key < 0 ? -1 : slice_of(next_key, table_.middle());
    next_fetched_ = 0;
    const int64_t line = 64 / weights_.element_size();
    next_piece_ = (size / flows / line + 1) * line;
    if (tiles_ != nullptr) {
      reduced_middle_ = weights_.reduced_data() + at;
      tiles_->pack(geometry_.left_rank, geometry_.middle_columns, reduced_middle_, packed_pairs_);
      return;
    }
    const int64_t r = geometry_.rank, padded = geometry_.rank_padded;
    if (r == padded) {
      middle_ = weights_.read(at, size, packed_);
      return;
    }
    for (int64_t i = 0; i < geometry_.left_rank * geometry_.middle_q; ++i) {
      weights_.copy(at + i * r, r, packed_ + i * padded);
      std::fill_n(packed_ + i * padded + r, padded - r, T(0));
    }
    middle_ = packed_;
  }

  // Makes `left` of the flow with key `key`, as number `i`.
  void set_left(int64_t i, int64_t key) {
    fetch_next_middle();
    if (geometry_.two_cores) return;
    if (tiles_ != nullptr) {
      const uint16_t* from = weights_.reduced_data() + slice_of(key, 0);
      for (int64_t row = 0; row < geometry_.left_rows; ++row) {
        std::copy_n(from + row * geometry_.left_rank, geometry_.left_rank,
                    reduced_left_ + (i * geometry_.left_rows + row) * left_pitch_);
      }
      return;
    }
    T* left = left_ + i * geometry_.left_size();
    if (!geometry_.four_cores) {
      weights_.copy(slice_of(key, 0), geometry_.left_size(), left);
      return;
    }
    const int64_t columns = table_.q[1] * table_.r[2];
    kernels_.gemm(table_.q[0], columns, table_.r[1], first(key), table_.r[1], 1, second(key), columns, left, columns,
                  false);
  }

  // Makes C of the flows number `first` to `first` + n - 1.
  void multiply(int64_t first, int64_t n) {
    if (geometry_.two_cores) return;
    if (tiles_ != nullptr) {  // all flows that there is `left` of: first is 0
      tiles_->multiply(n * geometry_.left_rows, left_pitch_, geometry_.middle_columns, reduced_left_, packed_pairs_,
                       c_);
      return;
    }
    kernels_.gemm(n * geometry_.left_rows, geometry_.middle_columns, geometry_.left_rank, left(first),
                  geometry_.left_rank, 1, middle_, geometry_.middle_columns, c_, geometry_.middle_columns, false);
  }

  // Slices of the cores before the middle one, of four. Good until the next call for another key.
  const T* first(int64_t key) const { return weights_.read(slice_of(key, 0), table_.slice_size(0), first_); }
  const T* second(int64_t key) const { return weights_.read(slice_of(key, 1), table_.slice_size(1), second_); }
  const T* middle() const { return middle_; }  // [left_rank, middle_q, rank_padded]
  const TileKernels<T>* tiles() const { return tiles_; }
  // With tiles: the middle slice as it is stored, and `left` of all flows, [32, left_pitch].
  const uint16_t* reduced_middle() const { return reduced_middle_; }
  const uint16_t* reduced_left() const { return reduced_left_; }
  int64_t left_pitch() const { return left_pitch_; }
  // [left_rows, left_rank] of flow number i
  const T* left(int64_t i) const { return left_ + i * geometry_.left_size(); }
  // [m, rank_padded] of the flow that is number i of those that C was made for
  const T* c(int64_t i) const { return geometry_.two_cores ? middle_ : c_ + i * geometry_.c_size(); }

 private:
  // Asks for a piece of the next middle slice. Slices come from far away; with a piece a flow they are there in time,
  // and do not hold up what the flow needs.
  void fetch_next_middle() {
    const int64_t size = table_.slice_size(table_.middle());
    if (next_middle_ < 0 || next_fetched_ >= size) return;
    weights_.prefetch_far(next_middle_ + next_fetched_, std::min(next_piece_, size - next_fetched_));
    next_fetched_ += next_piece_;
  }

  // Where the slice of core k is in the weights.
  int64_t slice_of(int64_t key, int k) const {
    return table_.core_offset[k] + table_.digit(key, k) * table_.slice_size(k);
  }

  const Kernels<T>& kernels_;
  const Weights<T>& weights_;
  const Table& table_;
  const Geometry& geometry_;
  const TileKernels<T>* tiles_;
  const T* middle_ = nullptr;
  int64_t next_middle_ = -1;  // in the weights
  int64_t next_fetched_ = 0, next_piece_ = 0;
  T *left_ = nullptr, *c_ = nullptr;
  T* packed_ = nullptr;                     // the middle slice widened and padded
  T *first_ = nullptr, *second_ = nullptr;  // slices of the cores before it, widened
  const uint16_t* reduced_middle_ = nullptr;
  uint16_t* reduced_left_ = nullptr;
  uint32_t* packed_pairs_ = nullptr;  // the middle slice for tiles
  int64_t left_pitch_ = 0;
};

// The end of the flows [flow, end) that share the middle slice of the first.
inline int64_t end_of_middle(const Table& table, const FlowPlan& plan, int64_t flow, int64_t end) {
  const int64_t middle = table.middle_key(plan.row_keys[plan.flow_starts[flow]]);
  do {
    ++flow;
  } while (flow < end && table.middle_key(plan.row_keys[plan.flow_starts[flow]]) == middle);
  return flow;
}

}  // namespace flowtt::cpu
