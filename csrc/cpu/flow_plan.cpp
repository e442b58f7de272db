#include "cpu/flow_plan.h"

#include <algorithm>
#include <numeric>

#include "cpu/isa.h"
#include "cpu/radix_sort.h"

namespace flowtt::cpu {
namespace {

constexpr int64_t kLookupsPerTask = 8192;  // fewer are not worth waking a thread
constexpr int64_t kChunk = 512;            // keys made at a time, in the first-level cache

int bits_of_keys(const std::vector<Table>& tables) {
  return tables[0].table_shift + bits_for(static_cast<int64_t>(tables.size()));
}

KeyRule key_rule(const Table& table, int64_t number) {
  KeyRule rule{table.num_cores, table.num_embeddings, {}, {}, number << table.table_shift};
  std::copy(table.p, table.p + kMaxCores, rule.p);
  std::copy(table.digit_shift, table.digit_shift + kMaxCores, rule.shift);
  return rule;
}

struct Invalid {
  int64_t count = 0;
  int64_t first = -1;
};

// Makes the keys of lookups [begin, end) and calls keep(position, keys, n) for each piece of them, and fills in the
// bags.
template <class Keep>
Invalid make_keys(const std::vector<Table>& tables, const Batch& batch, const Integers& indices, int64_t begin,
                  int64_t end, int32_t* bags, const Keep& keep) {
  const KeyKernels& kernels = instruction_set().keys;
  Invalid invalid;
  int64_t keys[kChunk];
  // The bag of lookup `begin`: the last one that starts at or before it.
  int64_t low = 0;
  for (int64_t high = batch.num_bags(); low + 1 < high;) {
    const int64_t middle = (low + high) / 2;
    (batch.offsets[middle] <= begin ? low : high) = middle;
  }
  int64_t bag = low;
  for (int64_t feature = bag / batch.batch_size, at = begin; at < end; ++feature) {
    const int64_t feature_end = std::min(end, batch.start(feature + 1));
    if (at == feature_end) continue;
    const int64_t number = batch.table(feature);
    const Table& table = tables[static_cast<size_t>(number)];
    const KeyRule rule = key_rule(table, number);
    bag = std::max(bag, feature * batch.batch_size);
    while (at < feature_end) {
      const int64_t n = std::min(kChunk, feature_end - at);
      const int64_t bad = indices.wide() ? kernels.from_int64(rule, indices.int64s() + at, n, keys)
                                         : kernels.from_int32(rule, indices.int32s() + at, n, keys);
      if (bad > 0 && invalid.first < 0) {
        invalid.first = at;
        while (indices[invalid.first] >= 0 && indices[invalid.first] < table.num_embeddings) ++invalid.first;
      }
      invalid.count += bad;
      keep(at, keys, n);
      for (const int64_t stop = at + n; at < stop;) {
        const int64_t bag_end = std::min(stop, batch.offsets[bag + 1]);
        for (; at < bag_end; ++at) bags[at] = static_cast<int32_t>(bag);
        if (at < stop) ++bag;
      }
    }
  }
  return invalid;
}

struct Starts {
  bool row;
  bool flow;
};

// Whether a lookup with key `key` after one with key `before` starts a row, and a flow.
inline Starts starts_at(const std::vector<Table>& tables, bool one_row_flows, uint64_t before, uint64_t key) {
  const bool row = key != before;
  if (one_row_flows || !row) return {row, row};
  const Table& table = tables[static_cast<size_t>(key >> tables[0].table_shift)];
  return {row, table.flow_key(static_cast<int64_t>(key ^ before)) != 0};
}

template <class Item>
PlanResult sorted_plan(const Executor& executor, const std::vector<Table>& tables, const Batch& batch,
                       const Integers& indices, Flow flow, BoundsCheckMode mode, const FlowPlanBuffers& out) {
  const int64_t n = batch.num_lookups;
  const int64_t num_tasks = executor.num_tasks(n, kLookupsPerTask);
  Buffer<Item> items(static_cast<size_t>(n)), spare(static_cast<size_t>(n));
  RadixSort radix_sort(num_tasks, bits_of_keys(tables), n);
  std::vector<Invalid> invalid(static_cast<size_t>(num_tasks));
  executor.run(num_tasks, [&](int64_t task) {
    const auto keep = [&](int64_t at, const int64_t* keys, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        items[at + i] = Item(static_cast<uint64_t>(keys[i]), static_cast<uint32_t>(at + i));
      }
      radix_sort.count(task, items.data() + at, count);
    };
    invalid[task] = make_keys(tables, batch, indices, even_cut(n, task, num_tasks), even_cut(n, task + 1, num_tasks),
                              out.bags, keep);
  });
  executor.lap(Stage::kKeys);
  PlanResult result{{0, 0, 0}, -1};
  for (const Invalid& found : invalid) {
    if (result.first_invalid < 0) result.first_invalid = found.first;
    result.counts.num_invalid += found.count;
  }
  if (result.counts.num_invalid > 0 && mode == BoundsCheckMode::kFatal) return result;

  const Item* sorted = radix_sort.sort(executor, items.data(), spare.data());
  executor.lap(Stage::kSort);

  // Distinct rows and flows: tasks count those that start in their ranges, then write them after their predecessors'.
  // The last task's count comes with the writing.
  std::vector<PlanCounts> counts(static_cast<size_t>(num_tasks + 1), PlanCounts{0, 0, 0});
  const bool one_row_flows = flow == Flow::kUnique;
  const auto for_each_start = [&](int64_t task, const auto& visit) {
    int64_t i = even_cut(n, task, num_tasks);
    const int64_t end = even_cut(n, task + 1, num_tasks);
    if (i == end) return;
    uint64_t before = i == 0 ? ~sorted[0].key() : sorted[i - 1].key();  // the first lookup always starts a row
    for (; i < end; ++i) {
      const uint64_t key = sorted[i].key();
      visit(i, key, i == 0 ? Starts{true, true} : starts_at(tables, one_row_flows, before, key));
      before = key;
    }
  };
  executor.run(num_tasks - 1, [&](int64_t task) {
    PlanCounts& count = counts[task + 1];
    for_each_start(task, [&](int64_t, uint64_t, Starts starts) {
      count.num_rows += starts.row;
      count.num_flows += starts.flow;
    });
  });
  for (int64_t task = 1; task < num_tasks; ++task) {
    counts[task].num_rows += counts[task - 1].num_rows;
    counts[task].num_flows += counts[task - 1].num_flows;
  }
  executor.run(num_tasks, [&](int64_t task) {
    int64_t row = counts[task].num_rows, flow_number = counts[task].num_flows;
    for_each_start(task, [&](int64_t i, uint64_t key, Starts starts) {
      out.lookups[i] = static_cast<int32_t>(sorted[i].position());
      if (!starts.row) return;
      if (starts.flow) out.flow_starts[flow_number++] = static_cast<int32_t>(row);
      out.row_keys[row] = static_cast<int64_t>(key);
      out.row_starts[row++] = static_cast<int32_t>(i);
    });
    if (task == num_tasks - 1) counts[num_tasks] = {row, flow_number, 0};
  });
  result.counts.num_rows = counts[num_tasks].num_rows;
  result.counts.num_flows = counts[num_tasks].num_flows;
  return result;
}

PlanResult direct_plan(const Executor& executor, const std::vector<Table>& tables, const Batch& batch,
                       const Integers& indices, const FlowPlanBuffers& out) {
  const int64_t n = batch.num_lookups;
  const int64_t num_tasks = executor.num_tasks(n, kLookupsPerTask);
  std::vector<Invalid> invalid(static_cast<size_t>(num_tasks));
  executor.run(num_tasks, [&](int64_t task) {
    const int64_t begin = even_cut(n, task, num_tasks), end = even_cut(n, task + 1, num_tasks);
    const auto keep = [&](int64_t at, const int64_t* keys, int64_t count) {
      std::copy(keys, keys + count, out.row_keys + at);
    };
    invalid[task] = make_keys(tables, batch, indices, begin, end, out.bags, keep);
    for (int32_t* numbers : {out.lookups, out.row_starts, out.flow_starts}) {
      std::iota(numbers + begin, numbers + end, static_cast<int32_t>(begin));
    }
  });
  PlanResult result{{n, n, 0}, -1};
  for (const Invalid& found : invalid) {
    if (result.first_invalid < 0) result.first_invalid = found.first;
    result.counts.num_invalid += found.count;
  }
  return result;
}

}  // namespace

int64_t first_fall(const Executor& executor, const Batch& batch) {
  const int64_t bags = batch.num_bags();
  const int64_t num_tasks = executor.num_tasks(bags, 4 * kLookupsPerTask);
  std::vector<int64_t> found(static_cast<size_t>(num_tasks), -1);
  executor.run(num_tasks, [&](int64_t task) {
    const auto search = [&](const auto* offsets) {
      const int64_t begin = even_cut(bags, task, num_tasks), end = even_cut(bags, task + 1, num_tasks);
      bool falls = false;
      for (int64_t i = begin; i < end; ++i) falls |= offsets[i + 1] < offsets[i];
      if (!falls) return;
      found[task] = std::is_sorted_until(offsets + begin, offsets + end + 1) - offsets - 1;
    };
    batch.offsets.wide() ? search(batch.offsets.int64s()) : search(batch.offsets.int32s());
  });
  for (int64_t at : found) {
    if (at >= 0) return at;
  }
  return -1;
}

PlanResult make_flow_plan(const Executor& executor, const std::vector<Table>& tables, const Batch& batch,
                          const Integers& indices, Flow flow, BoundsCheckMode mode, const FlowPlanBuffers& out) {
  PlanResult result{{0, 0, 0}, -1};
  if (batch.num_lookups > 0) {
    if (flow == Flow::kDirect) {
      result = direct_plan(executor, tables, batch, indices, out);
    } else if (bits_of_keys(tables) <= ShortItem::kKeyBits) {
      result = sorted_plan<ShortItem>(executor, tables, batch, indices, flow, mode, out);
    } else {
      result = sorted_plan<LongItem>(executor, tables, batch, indices, flow, mode, out);
    }
  }
  executor.lap(flow == Flow::kDirect ? Stage::kKeys : Stage::kGroup);
  out.row_starts[result.counts.num_rows] = static_cast<int32_t>(batch.num_lookups);
  out.flow_starts[result.counts.num_flows] = static_cast<int32_t>(result.counts.num_rows);
  return result;
}

SortedPlan::SortedPlan(const Executor& executor, const std::vector<Table>& tables, const FlowPlan& plan) : plan_(plan) {
  const int64_t n = plan.num_rows;
  if (plan.num_flows != plan.num_lookups || std::is_sorted(plan.row_keys, plan.row_keys + n)) return;
  Buffer<LongItem> items(static_cast<size_t>(n)), spare(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    items[i] = LongItem(static_cast<uint64_t>(plan.row_keys[i]), static_cast<uint32_t>(plan.lookups[i]));
  }
  const int64_t num_tasks = executor.num_tasks(n, kLookupsPerTask);
  RadixSort radix_sort(num_tasks, bits_of_keys(tables), n);
  for (int64_t task = 0; task < num_tasks; ++task) {
    const int64_t begin = even_cut(n, task, num_tasks), end = even_cut(n, task + 1, num_tasks);
    radix_sort.count(task, items.data() + begin, end - begin);
  }
  const LongItem* sorted = radix_sort.sort(executor, items.data(), spare.data());
  lookups_ = Buffer<int32_t>(static_cast<size_t>(n));
  row_keys_ = Buffer<int64_t>(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    lookups_[i] = static_cast<int32_t>(sorted[i].position());
    row_keys_[i] = static_cast<int64_t>(sorted[i].key());
  }
  plan_.lookups = lookups_.data();
  plan_.row_keys = row_keys_.data();
}

}  // namespace flowtt::cpu
