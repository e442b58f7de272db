// Gradients of distinct rows: sums over their lookups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/executor.h"
#include "cpu/hot_rows.h"
#include "cpu/kernels.h"
#include "cpu/lookup.h"
#include "cpu/pooled_rows.h"

namespace flowtt::cpu {

template <class T>
class RowGradients {
 public:
  // `grad_output` is [batch_size, total_dim]; `grad_per_sample_weights` is [num_lookups], or null if not wanted.
  RowGradients(const Kernels<T>& kernels, const Lookup<T>& lookup, const HotRows& hot, const T* grad_output,
               T* grad_per_sample_weights)
      : kernels_(kernels),
        lookup_(lookup),
        plan_(lookup.plan),
        hot_(hot),
        pooled_(lookup.tables.size(), lookup.batch, lookup.total_dim),
        grad_output_(grad_output),
        grad_per_sample_weights_(grad_per_sample_weights),
        has_factors_(lookup.per_sample_weights != nullptr || lookup.pooling_mode == PoolingMode::kMean) {
    for (const Table& table : lookup.tables) widest_ = std::max(widest_, table.dim);
    chunk_sums_ = Buffer<T>(hot.chunks().size() * widest_);
    if (wants_factors()) hot_rows_ = Buffer<T>(hot.rows().size() * widest_);
  }

  // Must come before `of_row`.
  void sum_hot_chunks(const Executor& executor) {
    for_each_hot_chunk(executor, [this](int64_t chunk, const HotRows::Chunk& lookups) {
      const int64_t table = hot_.rows()[lookups.hot].table;
      sum_lookups(table, lookups.begin, lookups.end, chunk_sums_.data() + chunk * widest_);
    });
  }

  // The pooled row's gradient at the bag of a lookup.
  const T* of_bag(int64_t table, int32_t lookup) const {
    return grad_output_ + pooled_.offset(table, plan_.bags[lookup]);
  }

  // Sum over the lookups of a row, in their order; in `spare` unless there is but one, without a factor.
  const T* of_row(int64_t table, int64_t row, T* spare) const {
    const int64_t begin = plan_.row_starts[row], end = plan_.row_starts[row + 1];
    if (!has_factors_ && end - begin == 1) return of_bag(table, plan_.lookups[begin]);
    if (hot_.is_hot(row)) {
      sum_chunks(hot_.rows()[hot_.find(row)], spare);
    } else {
      sum_lookups(table, begin, end, spare);
    }
    return spare;
  }

  bool wants_factors() const { return grad_per_sample_weights_ != nullptr; }

  // Gradients of the per-sample weights of a row's lookups, the row being `made`.
  void take_factors(int64_t table, int64_t row, const T* made) const {
    if (hot_.is_hot(row)) {
      std::copy_n(made, lookup_.tables[table].dim, hot_rows_.data() + hot_.find(row) * widest_);
    } else {
      take_factors(table, plan_.row_starts[row], plan_.row_starts[row + 1], made);
    }
  }

  // Must come after all of `take_factors`.
  void take_hot_factors(const Executor& executor) {
    if (!wants_factors()) return;
    for_each_hot_chunk(executor, [this](int64_t, const HotRows::Chunk& lookups) {
      const T* made = hot_rows_.data() + lookups.hot * widest_;
      take_factors(hot_.rows()[lookups.hot].table, lookups.begin, lookups.end, made);
    });
  }

 private:
  static constexpr int64_t kBlock = 128;  // rows summed at once

  template <class Body>
  void for_each_hot_chunk(const Executor& executor, const Body& body) const {
    const auto count = static_cast<int64_t>(hot_.chunks().size());
    const int64_t num_tasks = count == 0 ? 0 : executor.num_tasks(count, 1);
    executor.run(num_tasks, [&](int64_t task) {
      const int64_t end = even_cut(count, task + 1, num_tasks);
      for (int64_t chunk = even_cut(count, task, num_tasks); chunk < end; ++chunk) body(chunk, hot_.chunks()[chunk]);
    });
  }

  T mean_factor(int32_t lookup) const {
    if (lookup_.pooling_mode != PoolingMode::kMean) return T(1);
    const int64_t bag = plan_.bags[lookup];
    return T(1) / static_cast<T>(lookup_.batch.offsets[bag + 1] - lookup_.batch.offsets[bag]);
  }
  // What a lookup's row is multiplied by when its bag is pooled.
  T factor(int32_t lookup) const {
    const T weight = lookup_.per_sample_weights == nullptr ? T(1) : lookup_.per_sample_weights[lookup];
    return weight * mean_factor(lookup);
  }

  // Sum over the lookups [begin, end) in key order.
  void sum_lookups(int64_t table, int64_t begin, int64_t end, T* sum) const {
    const int64_t dim = lookup_.tables[table].dim;
    const T* bags[kBlock];
    T factors[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t lookup = plan_.lookups[at + i];
        bags[i] = of_bag(table, lookup);
        if (has_factors_) factors[i] = factor(lookup);
      }
      kernels_.sum_rows(n, bags, has_factors_ ? factors : nullptr, dim, sum, at > begin);
    }
  }

  void sum_chunks(const HotRows::Row& row, T* sum) const {
    const int64_t dim = lookup_.tables[row.table].dim;
    const T* parts[kBlock];
    for (int64_t at = 0; at < row.num_chunks; at += kBlock) {
      const int64_t n = std::min(kBlock, row.num_chunks - at);
      for (int64_t i = 0; i < n; ++i) parts[i] = chunk_sums_.data() + (row.first_chunk + at + i) * widest_;
      kernels_.sum_rows(n, parts, nullptr, dim, sum, at > 0);
    }
  }

  void take_factors(int64_t table, int64_t begin, int64_t end, const T* made) const {
    const int64_t dim = lookup_.tables[table].dim;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t lookup = plan_.lookups[i];
      grad_per_sample_weights_[lookup] = mean_factor(lookup) * kernels_.dot(dim, of_bag(table, lookup), made);
    }
  }

  const Kernels<T>& kernels_;
  const Lookup<T>& lookup_;
  const FlowPlan& plan_;
  const HotRows& hot_;
  const PooledRows pooled_;
  const T* grad_output_;
  T* grad_per_sample_weights_;
  const bool has_factors_;
  int64_t widest_ = 0;    // most columns of a table
  Buffer<T> chunk_sums_;  // [chunks, widest]
  Buffer<T> hot_rows_;    // [hot rows, widest]
};

}  // namespace flowtt::cpu
