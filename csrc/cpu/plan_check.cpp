#include "cpu/plan_check.h"

#include <algorithm>
#include <cstdint>

namespace flowtt::cpu {
namespace {

constexpr int64_t kLookupsPerTask = 16384;

class PlanCheck {
 public:
  PlanCheck(const Executor& executor, const std::vector<Table>& tables, const Batch& batch, const FlowPlan& plan)
      : executor_(executor), tables_(tables), batch_(batch), plan_(plan) {}

  // Each check relies on those before it.
  const char* fault() const {
    const int64_t n = plan_.num_lookups, rows = plan_.num_rows, flows = plan_.num_flows;
    if ((rows == 0) != (n == 0) || (flows == 0) != (n == 0)) return "counts are not those of its lookups";
    if (!rise(plan_.row_starts, rows, n)) return "row_starts do not lead from 0 to the number of lookups";
    if (!rise(plan_.flow_starts, flows, rows)) return "flow_starts do not lead from 0 to the number of rows";
    const bool own_bags =
        batch_.offsets.wide() ? has_own_bags(batch_.offsets.int64s()) : has_own_bags(batch_.offsets.int32s());
    if (!own_bags) return "bags are not those of the offsets";
    if (!all(rows, [&](int64_t row) { return is_key(plan_.row_keys[row]); })) {
      return "row_keys are not those of rows that the tables have";
    }
    if (!in_order()) return "row_keys are out of order";
    if (!all(rows, [&](int64_t row) { return has_own_lookups(row); })) {
      return "lookups are not those of features that look up the table of their row";
    }
    if (!all(flows, [&](int64_t flow) { return has_one_prefix(flow); })) return "rows of a flow differ in their prefix";
    return are_different() ? nullptr : "lookups repeat";
  }

 private:
  // Whether test(i) is true for all 0 <= i < count.
  template <class Test>
  bool all(int64_t count, const Test& test) const {
    const int64_t num_tasks = executor_.num_tasks(count, kLookupsPerTask);
    std::vector<char> passed(static_cast<size_t>(num_tasks), 1);
    executor_.run(num_tasks, [&](int64_t task) {
      bool good = true;
      const int64_t end = even_cut(count, task + 1, num_tasks);
      for (int64_t i = even_cut(count, task, num_tasks); i < end; ++i) good = good && test(i);
      passed[task] = good;
    });
    return std::find(passed.begin(), passed.end(), 0) == passed.end();
  }

  // Whether starts [count + 1] go from 0 to `end`, each above the one before.
  bool rise(const int32_t* starts, int64_t count, int64_t end) const {
    return starts[0] == 0 && starts[count] == end && all(count, [&](int64_t i) { return starts[i] < starts[i + 1]; });
  }

  template <class Offset>
  bool has_own_bags(const Offset* offsets) const {
    const int32_t* bags = plan_.bags;
    const int64_t num_bags = batch_.num_bags();
    return all(plan_.num_lookups, [=](int64_t i) {
      const int64_t bag = bags[i];
      return 0 <= bag && bag < num_bags && offsets[bag] <= i && i < offsets[bag + 1];
    });
  }

  bool is_key(int64_t key) const {
    const int64_t number = key >> tables_[0].table_shift;
    if (number < 0 || number >= static_cast<int64_t>(tables_.size())) return false;
    const Table& table = tables_[number];
    int64_t row = 0, rest = key ^ number << table.table_shift;
    for (int k = 0; k < table.num_cores; ++k) {
      const int64_t digit = table.digit(key, k);
      if (digit >= table.p[k]) return false;
      row = row * table.p[k] + digit;
      rest ^= digit << table.digit_shift[k];
    }
    return rest == 0 && row < table.num_embeddings;
  }

  // Keys rise, unless every lookup is by itself, in the order given.
  bool in_order() const {
    if (all(plan_.num_rows - 1, [&](int64_t row) { return plan_.row_keys[row] < plan_.row_keys[row + 1]; })) {
      return true;
    }
    return plan_.num_flows == plan_.num_lookups &&
           all(plan_.num_lookups, [&](int64_t i) { return plan_.lookups[i] == i; });
  }

  // Lookups of one row keep their order.
  bool has_own_lookups(int64_t row) const {
    const int64_t table = plan_.row_keys[row] >> tables_[0].table_shift;
    int64_t before = -1;
    for (int64_t i = plan_.row_starts[row]; i < plan_.row_starts[row + 1]; ++i) {
      const int64_t lookup = plan_.lookups[i];
      if (lookup <= before || lookup >= plan_.num_lookups) return false;
      if (batch_.table(feature_of(plan_.bags[lookup])) != table) return false;
      before = lookup;
    }
    return true;
  }

  // Both fit 32 bits, and a division of 64 takes several times as long.
  int64_t feature_of(int32_t bag) const {
    return static_cast<uint32_t>(bag) / static_cast<uint32_t>(batch_.batch_size);
  }

  bool has_one_prefix(int64_t flow) const {
    const int64_t first = plan_.row_keys[plan_.flow_starts[flow]];
    const Table& table = tables_[first >> tables_[0].table_shift];
    for (int64_t row = plan_.flow_starts[flow] + 1; row < plan_.flow_starts[flow + 1]; ++row) {
      if (table.flow_key(plan_.row_keys[row]) != table.flow_key(first)) return false;
    }
    return true;
  }

  // Whether no lookup is there twice; each is known to be one.
  bool are_different() const {
    std::vector<char> seen(static_cast<size_t>(plan_.num_lookups), 0);
    for (int64_t i = 0; i < plan_.num_lookups; ++i) seen[plan_.lookups[i]] = 1;
    return std::find(seen.begin(), seen.end(), 0) == seen.end();
  }

  const Executor& executor_;
  const std::vector<Table>& tables_;
  const Batch& batch_;
  const FlowPlan& plan_;
};

}  // namespace

const char* fault_of_plan(const Executor& executor, const std::vector<Table>& tables, const Batch& batch,
                          const FlowPlan& plan) {
  return PlanCheck(executor, tables, batch, plan).fault();
}

}  // namespace flowtt::cpu
