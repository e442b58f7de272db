// What the ops know of a tensor-train table, read from the int64 descriptors that flowtt_torchrec/layout.py writes.
#pragma once

#include <cstdint>

namespace flowtt {

constexpr int kMaxCores = 4;

// Columns of a table's descriptor; they mirror flowtt_torchrec/layout.py. Cores that a table does not have are p = q =
// r = 1 with offset and shift 0.
enum TableColumn : int {
  kNumCores = 0,
  kNumEmbeddings = 1,
  kEmbeddingDim = 2,
  kP = 3,              // p_1 .. p_4
  kQ = 7,              // q_1 .. q_4
  kRanks = 11,         // r_0 .. r_4
  kCoreOffsets = 16,   // first element of each core in the weights
  kDigitShifts = 20,   // bit at which each digit starts in a key
  kSliceOffsets = 24,  // first slice of each core in per-slice optimizer state
  kTableShift = 28,    // bit at which the table's number starts in a key
  kFingerprint = 29,   // of the whole layout, the same in every row
  kTableColumns = 32,
};

// Bits that hold a digit of radix `p`.
constexpr int bits_for(int64_t p) {
  int bits = 0;
  while ((int64_t{1} << bits) < p) ++bits;
  return bits;
}

// One table. Core k is the array [p_k, r_k, q_k, r_{k+1}] with k counted from 0.
//
// The key of a row is `table << table_shift | digits`, a bit field a digit, most significant first: the middle digits
// from the last to the first, then digit 0, then the last digit. Hence rows of one prefix are neighbours in key order,
// and so are prefixes that share the middle slice.
struct Table {
  int number;  // among the tables of a call
  int num_cores;
  int64_t num_embeddings;
  int64_t dim;
  int64_t p[kMaxCores];
  int64_t q[kMaxCores];
  int64_t r[kMaxCores + 1];
  int64_t core_offset[kMaxCores];
  int digit_shift[kMaxCores];
  int64_t digit_mask[kMaxCores];
  int64_t slice_offset[kMaxCores];
  int table_shift;

  int last() const { return num_cores - 1; }
  // The last core but one, by far the largest: the middle one of three, the first of two.
  int middle() const { return num_cores - 2; }

  int64_t slice_size(int k) const { return r[k] * q[k] * r[k + 1]; }

  int64_t digit(int64_t key, int k) const { return (key >> digit_shift[k]) & digit_mask[k]; }
  // Equal for keys of one table whose rows share the middle slice.
  int64_t middle_key(int64_t key) const { return key >> digit_shift[middle()]; }
  // Equal for keys of one table whose rows share all digits but the last.
  int64_t flow_key(int64_t key) const { return key >> digit_shift[0]; }
};

inline Table read_table(int number, const int64_t* columns) {
  Table table{};
  table.number = number;
  table.num_cores = static_cast<int>(columns[kNumCores]);
  table.num_embeddings = columns[kNumEmbeddings];
  table.dim = columns[kEmbeddingDim];
  for (int k = 0; k < kMaxCores; ++k) {
    table.p[k] = columns[kP + k];
    table.q[k] = columns[kQ + k];
    table.core_offset[k] = columns[kCoreOffsets + k];
    table.digit_shift[k] = static_cast<int>(columns[kDigitShifts + k]);
    table.digit_mask[k] = (int64_t{1} << bits_for(table.p[k])) - 1;
    table.slice_offset[k] = columns[kSliceOffsets + k];
  }
  for (int k = 0; k <= kMaxCores; ++k) table.r[k] = columns[kRanks + k];
  table.table_shift = static_cast<int>(columns[kTableShift]);
  return table;
}

}  // namespace flowtt
