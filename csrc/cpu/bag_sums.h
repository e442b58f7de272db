// Pooling while rows are made: rows are added to their bags, and not kept.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/executor.h"
#include "cpu/hot_rows.h"
#include "cpu/kernels.h"
#include "cpu/lookup.h"
#include "cpu/partition.h"
#include "cpu/pooled_rows.h"

namespace flowtt::cpu {

// Where each task adds its rows. The task with the first flows of a segment adds to the output itself, others with
// flows of the segment to copies of the table's columns; at the end these are added, and so are hot rows, which no task
// has alone.
template <class T>
class BagSums {
 public:
  // `hot_rows` is [hot rows, `stride`], complete before `finish`. `output` is [batch_size, total_dim].
  BagSums(const Executor& executor, const Kernels<T>& kernels, const Lookup<T>& lookup, const HotRows& hot,
          const T* hot_rows, int64_t stride, T* output)
      : executor_(executor),
        kernels_(kernels),
        lookup_(lookup),
        batch_(lookup.batch),
        hot_(hot),
        hot_rows_(hot_rows),
        stride_(stride),
        output_(output),
        in_output_(lookup.tables.size(), lookup.batch, lookup.total_dim),
        in_copies_(lookup.tables, lookup.batch) {}

  // The most elements that copies can take.
  int64_t copies_size() const {
    int64_t widest = 0;
    for (int64_t f = 0; f < batch_.num_features; ++f) widest = std::max(widest, in_copies_.row_size(f));
    return (executor_.num_threads - 1) * widest * batch_.batch_size;
  }

  void start(int64_t num_tasks) {
    copies_.resize(static_cast<size_t>(num_tasks));
    const int64_t size = batch_.batch_size * lookup_.total_dim, clearing = executor_.num_tasks(size, 1 << 16);
    executor_.run(clearing, [&](int64_t task) {
      const int64_t begin = even_cut(size, task, clearing);
      std::fill_n(output_ + begin, even_cut(size, task + 1, clearing) - begin, T(0));
    });
  }

  struct Place {
    T* bags;
    const PooledRows* rows;  // where bags lie there
  };
  // For a task with flows of a segment, the first ones or others.
  Place place(int64_t task, int64_t table, bool first) {
    if (first) return {output_, &in_output_};
    int64_t feature = 0;
    while (batch_.table(feature) != table) ++feature;
    const int64_t size = in_copies_.row_size(feature) * batch_.batch_size;
    copies_[task] = {table, Buffer<T>(static_cast<size_t>(size))};
    std::fill_n(copies_[task].bags.data(), size, T(0));
    return {copies_[task].bags.data(), &in_copies_};
  }

  void finish() {
    std::vector<double> bag_costs;  // by feature
    double total = 0;
    for (int64_t f = 0; f < batch_.num_features; ++f) {
      const int64_t table = batch_.table(f);
      double vectors = lookup_.pooling_mode == PoolingMode::kMean ? 1 : 0;
      for (const Copy& copy : copies_) vectors += copy.table == table ? 1 : 0;
      for (const HotRows::Row& row : hot_.rows()) {
        if (row.table != table) continue;
        vectors += static_cast<double>(row.num_chunks * HotRows::kChunk) / static_cast<double>(batch_.batch_size);
      }
      bag_costs.push_back(vectors * (static_cast<double>(lookup_.tables[table].dim) / 8 + 4));
      total += bag_costs.back();
    }
    if (total == 0) return;
    const auto begin = [&](int64_t f) { return f * batch_.batch_size; };
    const auto cost_before = [&](int64_t f, int64_t bag) { return bag_costs[f] * static_cast<double>(bag - begin(f)); };
    const std::vector<int64_t> cuts = cut_by_cost(executor_, batch_.num_features, begin, cost_before);
    executor_.run(static_cast<int64_t>(cuts.size()) - 1, [&](int64_t task) {
      for (int64_t f = 0; f < batch_.num_features; ++f) {
        const int64_t from = std::max(cuts[task], begin(f)), to = std::min(cuts[task + 1], begin(f + 1));
        if (from < to && bag_costs[f] > 0) finish_bags(f, from, to);
      }
    });
  }

 private:
  struct Copy {
    int64_t table = -1;
    Buffer<T> bags;
  };

  // Bags [begin, end) of a feature.
  void finish_bags(int64_t feature, int64_t begin, int64_t end) const {
    const int64_t table = batch_.table(feature), dim = lookup_.tables[table].dim;
    std::vector<const T*> parts;
    for (const Copy& copy : copies_) {
      if (copy.table == table) parts.push_back(copy.bags.data() + in_copies_.offset_of(feature, begin));
    }
    if (!parts.empty()) {
      for (int64_t bag = begin; bag < end; ++bag) {
        kernels_.sum_rows(static_cast<int64_t>(parts.size()), parts.data(), nullptr, dim, in_output(feature, bag),
                          true);
        for (const T*& part : parts) part += in_copies_.row_size(feature);
      }
    }
    for (const HotRows::Row& row : hot_.rows()) {
      if (row.table == table) add_hot_row(row, feature, begin, end);
    }
    if (lookup_.pooling_mode != PoolingMode::kMean) return;
    for (int64_t bag = begin; bag < end; ++bag) {
      take_mean(kernels_, batch_.offsets[bag + 1] - batch_.offsets[bag], dim, in_output(feature, bag));
    }
  }

  // Lookups of one row keep their order, so those of neighbouring bags are neighbours.
  void add_hot_row(const HotRows::Row& row, int64_t feature, int64_t begin, int64_t end) const {
    constexpr int64_t kBlock = 16;
    const FlowPlan& plan = lookup_.plan;
    const int32_t* last = plan.lookups + plan.row_starts[row.row + 1];
    const int32_t* at = std::lower_bound(plan.lookups + plan.row_starts[row.row], last, begin,
                                         [&](int32_t lookup, int64_t bag) { return plan.bags[lookup] < bag; });
    T* bags[kBlock];
    T factors[kBlock];
    while (at < last && plan.bags[*at] < end) {
      int64_t n = 0;
      for (; n < kBlock && at < last && plan.bags[*at] < end; ++n, ++at) {
        bags[n] = in_output(feature, plan.bags[*at]);
        if (lookup_.per_sample_weights != nullptr) factors[n] = lookup_.per_sample_weights[*at];
      }
      kernels_.spread_row(n, bags, lookup_.per_sample_weights == nullptr ? nullptr : factors,
                          lookup_.tables[row.table].dim, hot_rows_ + hot_.find(row.row) * stride_, Put::kAdd);
    }
  }

  T* in_output(int64_t feature, int64_t bag) const { return output_ + in_output_.offset_of(feature, bag); }

  const Executor& executor_;
  const Kernels<T>& kernels_;
  const Lookup<T>& lookup_;
  const Batch& batch_;
  const HotRows& hot_;
  const T* hot_rows_;
  const int64_t stride_;
  T* output_;
  const PooledRows in_output_, in_copies_;
  std::vector<Copy> copies_;  // by task; at most one each, as only its first segment starts in an earlier task
};

}  // namespace flowtt::cpu
