#include "cpu/flow_plan.h"

#include <algorithm>
#include <numeric>

#include "cpu/isa.h"
#include "cpu/radix_sort.h"

namespace flowtt::cpu {
namespace {

// Fewer are not worth waking a thread, five times a plan: each time takes as long as 5,000 lookups or more.
constexpr int64_t kLookupsPerTask = 32768;
constexpr int64_t kChunk = 512;  // keys made at a time, in the first-level cache

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

// Fills in the bags of lookups [at, end), the first of which is in `bag` or a later one. Returns that of the last.
template <class Offset>
int64_t fill_bags(const Offset* offsets, int64_t num_bags, int64_t bag, int64_t at, int64_t end, int32_t* bags) {
  while (offsets[bag + 1] <= at) ++bag;
  if (bag + end - at <= num_bags) {
    Offset different = 0;  // from bags that end one lookup after the other, as in most batches
    for (int64_t i = at; i < end; ++i) different |= offsets[bag + 1 + i - at] ^ static_cast<Offset>(i + 1);
    if (different == 0) {
      for (int64_t i = at; i < end; ++i) bags[i] = static_cast<int32_t>(bag + i - at);
      return bag + end - at - 1;
    }
  }
  while (at < end) {
    const int64_t bag_end = std::min<int64_t>(end, offsets[bag + 1]);
    for (; at < bag_end; ++at) bags[at] = static_cast<int32_t>(bag);
    if (at < end) ++bag;
  }
  return bag;
}

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
      const int64_t bags_end = batch.num_bags();
      bag = batch.offsets.wide() ? fill_bags(batch.offsets.int64s(), bags_end, bag, at, at + n, bags)
                                 : fill_bags(batch.offsets.int32s(), bags_end, bag, at, at + n, bags);
      at += n;
    }
  }
  return invalid;
}

// Walks over sorted lookups and tells where rows and flows start.
template <class Item>
class Starts {
 public:
  Starts(const std::vector<Table>& tables, Flow flow, const Item* sorted)
      : tables_(tables), table_shift_(tables[0].table_shift), one_row_flows_(flow == Flow::kUnique), sorted_(sorted) {}

  bool row(int64_t i) const { return i == 0 || sorted_[i].key() != sorted_[i - 1].key(); }
  bool flow(int64_t i) const {
    if (i == 0 || one_row_flows_) return row(i);
    const uint64_t key = sorted_[i].key();
    const Table& table = tables_[static_cast<size_t>(key >> table_shift_)];
    return table.flow_key(static_cast<int64_t>(key ^ sorted_[i - 1].key())) != 0;
  }

  // The first flow's start from lookup `i` on, or `end`.
  int64_t next_flow(int64_t i, int64_t end) const {
    while (i < end && !flow(i)) ++i;
    return i;
  }

 private:
  const std::vector<Table>& tables_;
  const int table_shift_;
  const bool one_row_flows_;
  const Item* sorted_;
};

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

  // Distinct rows and flows: tasks of whole flows count theirs, then write them after their predecessors'. The last
  // task's count comes with the writing.
  const Starts<Item> starts(tables, flow, sorted);
  std::vector<PlanCounts> counts(static_cast<size_t>(num_tasks + 1), PlanCounts{0, 0, 0});
  const auto cut = [&](int64_t task) { return starts.next_flow(even_cut(n, task, num_tasks), n); };
  executor.run(num_tasks - 1, [&](int64_t task) {
    PlanCounts& count = counts[task + 1];
    for (int64_t i = cut(task), end = cut(task + 1); i < end; ++i) {
      count.num_rows += starts.row(i);
      count.num_flows += starts.flow(i);
    }
  });
  for (int64_t task = 1; task < num_tasks; ++task) {
    counts[task].num_rows += counts[task - 1].num_rows;
    counts[task].num_flows += counts[task - 1].num_flows;
  }
  executor.run(num_tasks, [&](int64_t task) {
    // Written at every lookup, to the last row and flow so far, since branches on what starts where cannot be foreseen.
    int64_t row = counts[task].num_rows - 1, flow_number = counts[task].num_flows - 1;
    int64_t row_start = 0, flow_start = 0;
    for (int64_t i = cut(task), end = cut(task + 1); i < end; ++i) {
      const bool row_starts = starts.row(i), flow_starts = starts.flow(i);
      row += row_starts;
      flow_number += flow_starts;
      row_start = row_starts ? i : row_start;
      flow_start = flow_starts ? row : flow_start;
      out.lookups[i] = static_cast<int32_t>(sorted[i].position());
      out.row_keys[row] = static_cast<int64_t>(sorted[i].key());
      out.row_starts[row] = static_cast<int32_t>(row_start);
      out.flow_starts[flow_number] = static_cast<int32_t>(flow_start);
    }
    if (task == num_tasks - 1) counts[num_tasks] = {row + 1, flow_number + 1, 0};
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
