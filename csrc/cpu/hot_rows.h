// Rows that very many lookups share: several tasks work on each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flowtt/plan.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

class HotRows {
 public:
  static constexpr int64_t kLookups = 4096;  // a row with fewer is not hot
  static constexpr int64_t kChunk = 1024;    // lookups of a hot row that are taken together

  struct Row {
    int64_t row;
    int64_t table;
    int64_t first_chunk, num_chunks;
    int64_t lookups_before;  // lookups of earlier hot rows
  };
  // Lookups [begin, end), in key order, of hot row number `hot`.
  struct Chunk {
    int64_t hot;
    int64_t begin, end;
  };

  HotRows(const std::vector<Table>& tables, const FlowPlan& plan) : row_starts_(plan.row_starts) {
    const int32_t* starts = plan.row_starts;
    // A hot row has a lookup whose place is a multiple of kLookups.
    for (int64_t at = 0; at < plan.num_lookups; at += kLookups) {
      const int64_t row = std::upper_bound(starts, starts + plan.num_rows, static_cast<int32_t>(at)) - starts - 1;
      if (!is_hot(row) || (!rows_.empty() && rows_.back().row == row)) continue;
      const int64_t hot = static_cast<int64_t>(rows_.size()), first_chunk = static_cast<int64_t>(chunks_.size());
      for (int64_t begin = starts[row]; begin < starts[row + 1]; begin += kChunk) {
        chunks_.push_back({hot, begin, std::min<int64_t>(begin + kChunk, starts[row + 1])});
      }
      const int64_t table = plan.row_keys[row] >> tables[0].table_shift;
      rows_.push_back({row, table, first_chunk, static_cast<int64_t>(chunks_.size()) - first_chunk, lookups_});
      lookups_ += starts[row + 1] - starts[row];
    }
  }

  bool is_hot(int64_t row) const { return row_starts_[row + 1] - row_starts_[row] >= kLookups; }

  // The number of a hot row.
  int64_t find(int64_t row) const { return after(row) - rows_.begin() - 1; }

  // How many lookups are those of hot rows before `row`.
  int64_t lookups_before(int64_t row) const {
    const auto next = row == 0 ? rows_.begin() : after(row - 1);
    return next == rows_.end() ? lookups_ : next->lookups_before;
  }

  const std::vector<Row>& rows() const { return rows_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }

 private:
  // The first hot row behind `row`.
  std::vector<Row>::const_iterator after(int64_t row) const {
    return std::upper_bound(rows_.begin(), rows_.end(), row, [](int64_t r, const Row& hot) { return r < hot.row; });
  }

  const int32_t* row_starts_;
  std::vector<Row> rows_;  // in key order
  std::vector<Chunk> chunks_;
  int64_t lookups_ = 0;  // of all hot rows
};

}  // namespace flowtt::cpu
