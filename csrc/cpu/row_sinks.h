// Where distinct rows go.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/hot_rows.h"
#include "cpu/kernels.h"
#include "cpu/lookup.h"
#include "cpu/pooled_rows.h"
#include "cpu/prefetch.h"

namespace flowtt::cpu {

// Makes rows that this thread has streamed visible to others.
inline void end_streams() {
#if FLOWTT_X86
  __builtin_ia32_sfence();
#endif
}

// Rows are written to the bags that look them up, where these have at most one lookup each, or added to them.
template <class T>
class BagSink {
 public:
  // Hot rows are kept at `hot_rows` [hot rows, dim or more], `stride` apart, and nothing else is done with them.
  BagSink(const Kernels<T>& kernels, const Lookup<T>& lookup, const HotRows& hot, T* hot_rows, int64_t stride,
          int64_t table, T* bags, const PooledRows& pooled, Put put)
      : kernels_(kernels),
        hot_(hot),
        hot_rows_(hot_rows),
        stride_(stride),
        pooled_(pooled),
        row_starts_(lookup.plan.row_starts),
        lookups_(lookup.plan.lookups),
        bags_(lookup.plan.bags),
        factors_(lookup.per_sample_weights),
        table_(table),
        dim_(lookup.tables[table].dim),
        bags_at_(bags),
        put_(put) {}

  FLOWTT_PREFETCHING void prefetch_row(int64_t row) const {
    if (put_ != Put::kStream) prefetch(bag_of(row_starts_[row]), dim_);
  }

  // Where a row is to be made: at its final place if it has but one and needs no factor, else in `spare`.
  T* place(int64_t row, T* spare) const {
    const int64_t first = row_starts_[row];
    return is_final(first, row_starts_[row + 1]) ? bag_of(first) : spare;
  }

  // Takes a row that was made at `made`.
  void deliver(int64_t row, const T* made) const {
    const int64_t begin = row_starts_[row], end = row_starts_[row + 1];
    if (is_final(begin, end)) return;
    if (hot_.is_hot(row)) {
      std::copy_n(made, dim_, hot_rows_ + hot_.find(row) * stride_);
    } else {
      spread(begin, end, made);
    }
  }

  // Writes or adds a row to the bags of the lookups [begin, end), in key order.
  void spread(int64_t begin, int64_t end, const T* row) const {
    constexpr int64_t kBlock = 16;
    T* bags[kBlock];
    T factors[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      for (int64_t i = 0; i < n; ++i) {
        bags[i] = bag_of(at + i);
        if (put_ != Put::kStream) prefetch(bags[i], dim_);
        if (factors_ != nullptr) factors[i] = factors_[lookups_[at + i]];
      }
      kernels_.spread_row(n, bags, factors_ == nullptr ? nullptr : factors, dim_, row, put_);
    }
  }

 private:
  bool is_final(int64_t begin, int64_t end) const {
    return put_ == Put::kWrite && factors_ == nullptr && end - begin == 1;
  }

  // The bag of the lookup that is number i in key order.
  T* bag_of(int64_t i) const { return bags_at_ + pooled_.offset(table_, bags_[lookups_[i]]); }

  const Kernels<T>& kernels_;
  const HotRows& hot_;
  T* hot_rows_;
  const int64_t stride_;
  const PooledRows& pooled_;
  const int32_t* row_starts_;
  const int32_t* lookups_;
  const int32_t* bags_;
  const T* factors_;
  const int64_t table_, dim_;
  T* bags_at_;
  const Put put_;
};

// For other batches: rows are kept, to be pooled when all are there.
template <class T>
class BufferSink {
 public:
  // Rows from `first_row` on are kept at `rows`; `row_of_lookup` [num_lookups] takes the number of each lookup's row.
  BufferSink(const Lookup<T>& lookup, int64_t table, int64_t first_row, T* rows, int32_t* row_of_lookup)
      : row_starts_(lookup.plan.row_starts),
        lookups_(lookup.plan.lookups),
        dim_(lookup.tables[table].dim),
        first_row_(first_row),
        rows_(rows),
        row_of_lookup_(row_of_lookup) {}

  FLOWTT_PREFETCHING void prefetch_row(int64_t row) const { prefetch(place(row, nullptr), dim_); }

  T* place(int64_t row, T*) const { return rows_ + (row - first_row_) * dim_; }

  void deliver(int64_t row, const T*) const {
    for (int64_t i = row_starts_[row]; i < row_starts_[row + 1]; ++i) {
      row_of_lookup_[lookups_[i]] = static_cast<int32_t>(row);
    }
  }

 private:
  const int32_t* row_starts_;
  const int32_t* lookups_;
  const int64_t dim_, first_row_;
  T* rows_;
  int32_t* row_of_lookup_;
};

}  // namespace flowtt::cpu
