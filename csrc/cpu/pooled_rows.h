// Where bags lie in the pooled output.
#pragma once

#include <cstdint>
#include <vector>

#include "flowtt/batch.h"

namespace flowtt::cpu {

// The output is [batch_size, total_dim], features side by side.
class PooledRows {
 public:
  PooledRows(size_t num_tables, const Batch& batch, int64_t total_dim)
      : batch_(batch), total_dim_(total_dim), only_feature_(num_tables, kNone) {
    for (int64_t feature = 0; feature < batch.num_features; ++feature) {
      int64_t& only = only_feature_[batch.table(feature)];
      only = only == kNone ? feature : kSeveral;
    }
  }

  // Offset of the columns of `bag`, which looks up `table`.
  int64_t offset(int64_t table, int64_t bag) const {
    const int64_t only = only_feature_[table];
    return offset_of(only >= 0 ? only : bag / batch_.batch_size, bag);
  }
  int64_t offset_of(int64_t feature, int64_t bag) const {
    return (bag - feature * batch_.batch_size) * total_dim_ + batch_.column(feature);
  }

 private:
  static constexpr int64_t kNone = -1, kSeveral = -2;

  const Batch& batch_;
  int64_t total_dim_;
  std::vector<int64_t> only_feature_;  // by table; saves a division a lookup
};

}  // namespace flowtt::cpu
