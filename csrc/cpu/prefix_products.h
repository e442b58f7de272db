// Prefix products of flows that share an owner slice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/kernels.h"
#include "cpu/prefetch.h"
#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Rows of `left` whose products with an owner slice are made at once: enough to reuse what is loaded, and few enough
// that the products are still in the first-level cache when their flows' rows are made.
constexpr int64_t kProductRows = 12;

// Makes `left` of up to `left_capacity` flows, and C of up to `c_capacity` of them at a time; see Geometry for what
// they are.
template <class T>
class PrefixProducts {
 public:
  PrefixProducts(const Kernels<T>& kernels, Arena* arena, const T* weights, const Table& table,
                 const Geometry& geometry, int64_t left_capacity, int64_t c_capacity)
      : kernels_(kernels),
        table_(table),
        geometry_(geometry),
        owner_core_(weights + table.core_offset[table.owner()]),
        first_core_(weights + table.core_offset[0]),
        second_core_(weights + table.core_offset[1]),
        left_(arena->take<T>(geometry.two_cores ? 0 : left_capacity * geometry.left_size())),
        c_(arena->take<T>(geometry.two_cores ? 0 : c_capacity * geometry.c_size())),
        packed_(geometry.rank == geometry.rank_padded ? nullptr : arena->take<T>(geometry.owner_size())) {}

  // Makes the owner slice of `key` current, for `flows` flows; that of `next_key` will follow, or none if it is
  // negative.
  void set_owner(int64_t key, int64_t flows, int64_t next_key) {
    owner_ = slice_of(key);
    next_owner_ = next_key < 0 ? nullptr : slice_of(next_key);
    next_fetched_ = 0;
    next_piece_ = (table_.slice_size(table_.owner()) / flows / kLine + 1) * kLine;
    if (packed_ == nullptr) return;
    const int64_t r = geometry_.rank, padded = geometry_.rank_padded;
    for (int64_t i = 0; i < geometry_.left_rank * geometry_.owner_q; ++i) {
      std::memcpy(packed_ + i * padded, owner_ + i * r, r * sizeof(T));
      std::memset(packed_ + i * padded + r, 0, (padded - r) * sizeof(T));
    }
    owner_ = packed_;
  }

  // Makes `left` of the flow with key `key`, as number `i`.
  void set_left(int64_t i, int64_t key) {
    fetch_next_owner();
    if (geometry_.two_cores) return;
    T* left = left_ + i * geometry_.left_size();
    const T* first = this->first(key);
    if (!geometry_.four_cores) {
      std::memcpy(left, first, geometry_.left_size() * sizeof(T));
      return;
    }
    const int64_t columns = table_.q[1] * table_.r[2];
    kernels_.gemm(table_.q[0], columns, table_.r[1], first, table_.r[1], 1, second(key), columns, left, columns, false);
  }

  // Makes C of the flows number `first` to `first` + n - 1.
  void multiply(int64_t first, int64_t n) {
    if (geometry_.two_cores) return;
    kernels_.gemm(n * geometry_.left_rows, geometry_.owner_columns, geometry_.left_rank, left(first),
                  geometry_.left_rank, 1, owner_, geometry_.owner_columns, c_, geometry_.owner_columns, false);
  }

  const T* first(int64_t key) const { return first_core_ + table_.digit(key, 0) * table_.slice_size(0); }
  const T* second(int64_t key) const { return second_core_ + table_.digit(key, 1) * table_.slice_size(1); }
  const T* owner() const { return owner_; }  // [left_rank, owner_q, rank_padded]
  // [left_rows, left_rank] of flow number i
  const T* left(int64_t i) const { return left_ + i * geometry_.left_size(); }
  // [m, rank_padded] of the flow that is number i of those that C was made for
  const T* c(int64_t i) const { return geometry_.two_cores ? owner_ : c_ + i * geometry_.c_size(); }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);

  // Asks for a piece of the next owner slice. Slices come from far away; with a piece a flow they are there in time,
  // and do not hold up what the flow needs.
  void fetch_next_owner() {
    const int64_t size = table_.slice_size(table_.owner());
    if (next_owner_ == nullptr || next_fetched_ >= size) return;
    prefetch_far(next_owner_ + next_fetched_, std::min(next_piece_, size - next_fetched_));
    next_fetched_ += next_piece_;
  }

  const T* slice_of(int64_t key) const {
    const int k = table_.owner();
    return owner_core_ + table_.digit(key, k) * table_.slice_size(k);
  }

  const Kernels<T>& kernels_;
  const Table& table_;
  const Geometry& geometry_;
  const T* owner_core_;
  const T* first_core_;
  const T* second_core_;
  const T* owner_ = nullptr;
  const T* next_owner_ = nullptr;
  int64_t next_fetched_ = 0, next_piece_ = 0;
  T *left_, *c_, *packed_;
};

// The end of the flows [flow, end) that share the owner slice of the first.
inline int64_t end_of_owner(const Table& table, const FlowPlan& plan, int64_t flow, int64_t end) {
  const int64_t owner = table.owner_key(plan.row_keys[plan.flow_starts[flow]]);
  do {
    ++flow;
  } while (flow < end && table.owner_key(plan.row_keys[plan.flow_starts[flow]]) == owner);
  return flow;
}

}  // namespace flowtt::cpu
