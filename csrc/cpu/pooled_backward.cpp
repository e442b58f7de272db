#include "cpu/pooled_backward.h"

#include <algorithm>
#include <map>
#include <vector>

#include "cpu/flow_gradients.h"
#include "cpu/flow_plan.h"
#include "cpu/isa.h"

namespace flowtt::cpu {
namespace {

template <class T>
class Backward {
 public:
  Backward(const Executor& executor, const Lookup<T>& lookup, const T* grad_output, const GradientSink<T>& sink,
           T* grad_per_sample_weights)
      : executor_(executor),
        lookup_(lookup),
        kernels_(kernels<T>()),
        sink_(sink),
        hot_(lookup.tables, lookup.plan),
        rows_(kernels_, lookup, hot_, grad_output, grad_per_sample_weights),
        segments_(segments_by_table(lookup.tables, lookup.plan)) {}

  void run() {
    rows_.sum_hot_chunks(executor_);
    take_flows();
    rows_.take_hot_factors(executor_);
    executor_.lap(Stage::kFlows);
    sum_middles();
    sum_outer_cores();
    executor_.lap(Stage::kCores);
  }

 private:
  void take_flows() {
    std::vector<Cost> costs;
    for (const Table& table : lookup_.tables) {
      const Geometry g(table, kernels_.rank_multiple);
      const double product = g.two_cores ? 0 : static_cast<double>(g.left_size() * g.middle_columns);
      costs.push_back({3 * product / 30 + 150, static_cast<double>(g.c_size() * g.q) / 14 + 100,
                       static_cast<double>(g.dim) / 8 + 8});
    }
    const std::vector<int64_t> cuts = cut_flows(executor_, segments_, costs, lookup_.plan, hot_);
    const int64_t num_tasks = static_cast<int64_t>(cuts.size()) - 1;
    shares_.resize(static_cast<size_t>(num_tasks));
    partial_middles_.resize(static_cast<size_t>(num_tasks));
    kept_.resize(static_cast<size_t>(num_tasks));
    executor_.run(num_tasks, [&](int64_t task) {
      Arena arena;
      for (size_t s = 0; s < segments_.size(); ++s) {
        const int64_t begin = std::max(cuts[task], segments_[s].flow_begin);
        const int64_t end = std::min(cuts[task + 1], segments_[s].flow_end);
        if (begin < end) take_flows_of(task, static_cast<int64_t>(s), begin, end, &arena);
      }
    });
  }

  // Flows [begin, end) of a segment. What other tasks have flows of, too, is kept to be summed.
  void take_flows_of(int64_t task, int64_t s, int64_t begin, int64_t end, Arena* arena) {
    const Segment& segment = segments_[s];
    const bool whole = begin == segment.flow_begin && end == segment.flow_end;
    arena->clear();
    FlowGradients<T> flows(kernels_, arena, whole ? arena : &kept_[task], lookup_, rows_, sink_, segment, begin, end);
    const OuterGradients<T> gradients = flows.run(s, &partial_middles_[task]);
    if (!whole) {
      shares_[task].push_back({s, gradients});
      return;
    }
    const Table& table = lookup_.tables[segment.table];
    const OuterCores outer(table, Geometry(table, kernels_.rank_multiple));
    for (int i = 0; i < outer.size(); ++i)
      sum_slices({&table, outer[i], {&gradients[i]}}, 0, table.p[outer[i].core], arena);
  }

  // Middle slices whose flows were cut: at most one between two tasks.
  void sum_middles() {
    std::vector<const PartialMiddle<T>*> parts;
    const auto flush = [&] {
      if (parts.empty()) return;
      const Table& table = lookup_.tables[segments_[parts[0]->segment].table];
      const Geometry geometry(table, kernels_.rank_multiple);
      const Buffer<T> sum(static_cast<size_t>(geometry.middle_size()));
      const Buffer<T> spare(static_cast<size_t>(geometry.middle_size()));
      std::vector<const T*> rows;
      for (const PartialMiddle<T>* part : parts) rows.push_back(part->gradient.data());
      kernels_.sum_rows(static_cast<int64_t>(rows.size()), rows.data(), nullptr, geometry.middle_size(), sum.data(),
                        false);
      sink_.take(table, table.middle(), parts[0]->slice,
                 FlowGradients<T>::middle_gradient(geometry, sum.data(), spare.data()));
      parts.clear();
    };
    for (const auto& of_task : partial_middles_) {
      for (const PartialMiddle<T>& part : of_task) {
        if (!parts.empty() && (parts[0]->segment != part.segment || parts[0]->slice != part.slice)) flush();
        parts.push_back(&part);
      }
    }
    flush();
  }

  // One outer core of a table, and the tasks that touched it.
  struct Job {
    const Table* table;
    OuterCore core;
    std::vector<const TouchedSlices<T>*> touched;
  };

  void sum_outer_cores() {
    std::vector<Job> jobs;
    std::vector<int64_t> first_slice = {0};
    std::map<int64_t, std::vector<const OuterGradients<T>*>> of_segment;
    for (const auto& of_task : shares_) {
      for (const Share& share : of_task) of_segment[share.segment].push_back(&share.gradients);
    }
    for (const auto& [segment, parts] : of_segment) {
      const Table& table = lookup_.tables[segments_[segment].table];
      const OuterCores outer(table, Geometry(table, kernels_.rank_multiple));
      for (int i = 0; i < outer.size(); ++i) {
        jobs.push_back({&table, outer[i], {}});
        for (const OuterGradients<T>* gradients : parts) jobs.back().touched.push_back(&(*gradients)[i]);
        first_slice.push_back(first_slice.back() + table.p[outer[i].core]);
      }
    }
    const auto begin = [&](int64_t job) { return first_slice[job]; };
    const auto cost_before = [&](int64_t job, int64_t slice) {
      const double each = static_cast<double>(jobs[job].core.gradient_size()) / 4 + 20;
      return each * static_cast<double>(slice - first_slice[job]);
    };
    const auto cuts = cut_by_cost(executor_, static_cast<int64_t>(jobs.size()), begin, cost_before);
    executor_.run(static_cast<int64_t>(cuts.size()) - 1, [&](int64_t task) {
      Arena arena;
      for (size_t job = 0; job < jobs.size(); ++job) {
        const int64_t from = std::max(cuts[task], first_slice[job]);
        const int64_t to = std::min(cuts[task + 1], first_slice[job + 1]);
        if (from < to) sum_slices(jobs[job], from - first_slice[job], to - first_slice[job], &arena);
      }
    });
  }

  // Slices [begin, end) of an outer core, each summed over tasks in their order.
  void sum_slices(const Job& job, int64_t begin, int64_t end, Arena* arena) const {
    const int64_t size = job.core.gradient_size();
    T* sum = arena->take<T>(size);
    T* in_slice_form = arena->take<T>(size);
    std::vector<const T*> parts;
    for (int64_t slice = begin; slice < end; ++slice) {
      parts.clear();
      for (const TouchedSlices<T>* touched : job.touched) {
        if (const T* part = touched->find(slice)) parts.push_back(part);
      }
      if (parts.empty()) continue;
      if (parts.size() > 1) {
        kernels_.sum_rows(static_cast<int64_t>(parts.size()), parts.data(), nullptr, size, sum, false);
      }
      job.core.to_slice(kernels_, parts.size() > 1 ? sum : parts[0], in_slice_form);
      sink_.take(*job.table, job.core.core, slice, in_slice_form);
    }
  }

  struct Share {
    int64_t segment;
    OuterGradients<T> gradients;
  };

  const Executor& executor_;
  const Lookup<T>& lookup_;
  const Kernels<T>& kernels_;
  const GradientSink<T>& sink_;
  const HotRows hot_;
  RowGradients<T> rows_;
  const std::vector<Segment> segments_;
  std::vector<Arena> kept_;                                     // by task: memory of the shares
  std::vector<std::vector<Share>> shares_;                      // by task: tables that it shares with others
  std::vector<std::vector<PartialMiddle<T>>> partial_middles_;  // by task, in key order
};

}  // namespace

template <class T>
void pooled_backward(const Executor& executor, const Lookup<T>& lookup, const T* grad_output,
                     const GradientSink<T>& sink, T* grad_per_sample_weights) {
  const SortedPlan sorted(executor, lookup.tables, lookup.plan);
  executor.lap(Stage::kSort);
  Lookup<T> in_key_order = lookup;
  in_key_order.plan = sorted.plan();
  Backward<T>(executor, in_key_order, grad_output, sink, grad_per_sample_weights).run();
}

template void pooled_backward<float>(const Executor&, const Lookup<float>&, const float*, const GradientSink<float>&,
                                     float*);
template void pooled_backward<double>(const Executor&, const Lookup<double>&, const double*,
                                      const GradientSink<double>&, double*);

}  // namespace flowtt::cpu
