// Where bags lie in the pooled output.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "flowtt/batch.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

class PooledRows {
 public:
  // The output, [batch_size, total_dim], features side by side.
  PooledRows(size_t num_tables, const Batch& batch, int64_t total_dim) : PooledRows(num_tables, batch) {
    for (int64_t feature = 0; feature < batch.num_features; ++feature) {
      columns_.push_back({batch.column(feature), total_dim});
    }
  }

  // A table's own columns, [batch_size, its features * dim].
  PooledRows(const std::vector<Table>& tables, const Batch& batch) : PooledRows(tables.size(), batch) {
    std::vector<int64_t> sizes(tables.size(), 0);
    for (int64_t feature = 0; feature < batch.num_features; ++feature) {
      int64_t& size = sizes[batch.table(feature)];
      columns_.push_back({size, 0});
      size += tables[batch.table(feature)].dim;
    }
    for (int64_t feature = 0; feature < batch.num_features; ++feature) {
      columns_[feature].row_size = sizes[batch.table(feature)];
    }
  }

  // Offset of the columns of `bag`, which looks up `table`.
  int64_t offset(int64_t table, int64_t bag) const {
    const int64_t only = only_feature_[table];
    return offset_of(only >= 0 ? only : bag / batch_.batch_size, bag);
  }
  int64_t offset_of(int64_t feature, int64_t bag) const {
    return (bag - feature * batch_.batch_size) * columns_[feature].row_size + columns_[feature].first;
  }
  int64_t row_size(int64_t feature) const { return columns_[feature].row_size; }

 private:
  static constexpr int64_t kNone = -1, kSeveral = -2;

  PooledRows(size_t num_tables, const Batch& batch) : batch_(batch), only_feature_(num_tables, kNone) {
    for (int64_t feature = 0; feature < batch.num_features; ++feature) {
      int64_t& only = only_feature_[batch.table(feature)];
      only = only == kNone ? feature : kSeveral;
    }
  }

  struct Columns {
    int64_t first;
    int64_t row_size;  // from one bag to the next
  };

  const Batch& batch_;
  std::vector<int64_t> only_feature_;  // by table; saves a division a lookup
  std::vector<Columns> columns_;       // by feature
};

// The mean of `length` rows from their sum [dim], in its place.
template <class T>
void take_mean(const Kernels<T>& kernels, int64_t length, int64_t dim, T* sum) {
  if (length < 2) return;
  const T scale = T(1) / static_cast<T>(length);
  kernels.spread_row(1, &sum, &scale, dim, sum, Put::kWrite);
}

}  // namespace flowtt::cpu
