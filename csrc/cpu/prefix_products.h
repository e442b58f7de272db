// Prefix products of flows that share an owner slice.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/kernels.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// Makes `left` and C of up to `capacity` flows at a time; see Geometry for what they are.
template <class T>
class PrefixProducts {
 public:
  PrefixProducts(const Kernels<T>& kernels, const T* weights, const Table& table, const Geometry& geometry,
                 int64_t capacity)
      : kernels_(kernels),
        table_(table),
        geometry_(geometry),
        owner_core_(weights + table.core_offset[table.owner()]),
        first_core_(weights + table.core_offset[0]),
        second_core_(weights + table.core_offset[1]),
        left_(geometry.two_cores ? 0 : capacity * geometry.left_size()),
        c_(geometry.two_cores ? 0 : capacity * geometry.c_size()),
        packed_(geometry.rank == geometry.rank_padded ? 0 : geometry.owner_size()) {}

  // Makes the owner slice of `key` current.
  void set_owner(int64_t key) {
    const int k = table_.owner();
    owner_ = owner_core_ + table_.digit(key, k) * table_.slice_size(k);
    if (packed_.size() == 0) return;
    const int64_t r = geometry_.rank, padded = geometry_.rank_padded;
    for (int64_t i = 0; i < geometry_.left_rank * geometry_.owner_q; ++i) {
      std::memcpy(packed_.data() + i * padded, owner_ + i * r, r * sizeof(T));
      std::memset(packed_.data() + i * padded + r, 0, (padded - r) * sizeof(T));
    }
    owner_ = packed_.data();
  }

  // Makes `left` of the flow with key `key`, as number `i`.
  void set_left(int64_t i, int64_t key) {
    if (geometry_.two_cores) return;
    T* left = left_.data() + i * geometry_.left_size();
    const T* first = this->first(key);
    if (!geometry_.four_cores) {
      std::memcpy(left, first, geometry_.left_size() * sizeof(T));
      return;
    }
    const int64_t columns = table_.q[1] * table_.r[2];
    kernels_.gemm(table_.q[0], columns, table_.r[1], first, table_.r[1], 1, second(key), columns, left, columns, false);
  }

  // Makes C of the flows number 0 to n - 1.
  void multiply(int64_t n) {
    if (geometry_.two_cores) return;
    kernels_.gemm(n * geometry_.left_rows, geometry_.owner_columns, geometry_.left_rank, left_.data(),
                  geometry_.left_rank, 1, owner_, geometry_.owner_columns, c_.data(), geometry_.owner_columns, false);
  }

  const T* first(int64_t key) const { return first_core_ + table_.digit(key, 0) * table_.slice_size(0); }
  const T* second(int64_t key) const { return second_core_ + table_.digit(key, 1) * table_.slice_size(1); }
  const T* owner() const { return owner_; }       // [left_rank, owner_q, rank_padded]
  const T* left() const { return left_.data(); }  // [flows, left_rows, left_rank]
  // [m, rank_padded] of flow number i
  const T* c(int64_t i) const { return geometry_.two_cores ? owner_ : c_.data() + i * geometry_.c_size(); }

 private:
  const Kernels<T>& kernels_;
  const Table& table_;
  const Geometry& geometry_;
  const T* owner_core_;
  const T* first_core_;
  const T* second_core_;
  const T* owner_ = nullptr;
  Buffer<T> left_, c_, packed_;
};

// How many of the flows [flow, end), at most `most`, share the owner slice of the first.
inline int64_t flows_of_owner(const Table& table, const FlowPlan& plan, int64_t flow, int64_t end, int64_t most) {
  const int64_t owner = table.owner_key(plan.row_keys[plan.flow_starts[flow]]);
  int64_t n = 1;
  while (n < most && flow + n < end && table.owner_key(plan.row_keys[plan.flow_starts[flow + n]]) == owner) ++n;
  return n;
}

}  // namespace flowtt::cpu
