// A batch of lookups as TorchRec hands it over.
#pragma once

#include <cstdint>

namespace flowtt {

// Columns of a feature's descriptor; they mirror flowtt_torchrec/layout.py.
enum FeatureColumn : int {
  kFeatureTable = 0,
  kFirstColumn = 1,  // first output column
  kFeatureColumns = 2,
};

// int32 or int64 numbers.
class Integers {
 public:
  Integers(const void* data, bool wide) : data_(data), wide_(wide) {}

  int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  bool wide() const { return wide_; }
  const int64_t* int64s() const { return static_cast<const int64_t*>(data_); }
  const int32_t* int32s() const { return static_cast<const int32_t*>(data_); }

 private:
  const void* data_;
  bool wide_;
};

// Bag `f * batch_size + b` holds the lookups of feature f in sample b; features lie one after the other.
struct Batch {
  int64_t num_features;
  int64_t batch_size;
  int64_t num_lookups;
  const int64_t* features;  // [num_features, kFeatureColumns]
  Integers offsets;         // [num_features * batch_size + 1] first lookup of each bag, then num_lookups

  int64_t num_bags() const { return num_features * batch_size; }
  int64_t table(int64_t feature) const { return features[feature * kFeatureColumns + kFeatureTable]; }
  int64_t column(int64_t feature) const { return features[feature * kFeatureColumns + kFirstColumn]; }
  // First lookup of a feature.
  int64_t start(int64_t feature) const { return offsets[feature * batch_size]; }
};

}  // namespace flowtt
