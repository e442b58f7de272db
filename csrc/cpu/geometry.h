// Sizes of a table's matrices as the kernels see them.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "flowtt/table.h"

namespace flowtt::cpu {

// A row is  left [left_rows, left_rank] * middle slice [left_rank, middle_q * rank] -> C [m, rank], then C * last slice
// [rank, q]. `left` is the product of the cores before the middle one: nothing for two cores (C is the middle slice
// itself), the first core's slice for three, G_1 * G_2 for four. In buffers, ranks are padded with zeros.
struct Geometry {
  Geometry() = default;
  Geometry(const Table& table, int64_t rank_multiple) {
    const auto pad = [&](int64_t r) { return (r + rank_multiple - 1) / rank_multiple * rank_multiple; };
    const int middle = table.middle();
    left_rows = 1;
    for (int k = 0; k < middle; ++k) left_rows *= table.q[k];
    left_rank = table.r[middle];
    left_rank_padded = pad(left_rank);
    middle_q = table.q[middle];
    rank = table.r[middle + 1];
    rank_padded = pad(rank);
    q = table.q[middle + 1];
    first_rank_padded = pad(table.r[1]);
    m = left_rows * middle_q;
    middle_columns = middle_q * rank_padded;
    dim = m * q;
    two_cores = middle == 0;
    four_cores = middle == 2;
  }

  // How many flows make `rows` rows of `left`, or a little more.
  int64_t flows_of_rows(int64_t rows) const { return (rows + left_rows - 1) / left_rows; }

  RowShape row_shape() const { return {m, q, rank, rank_padded}; }
  int64_t scratch_size() const { return (m + 15) / 16 * 16 * rank_padded + 16 * (m + rank); }  // of RowKernels::forward
  int64_t left_size() const { return left_rows * left_rank; }
  int64_t c_size() const { return m * rank_padded; }
  int64_t middle_size() const { return left_rank * middle_columns; }
  int64_t last_size() const { return q * rank_padded; }

  int64_t left_rows, left_rank, left_rank_padded;
  int64_t middle_q, middle_columns;
  int64_t rank, rank_padded;
  int64_t q, m, dim;
  int64_t first_rank_padded;  // r_1, of use with four cores
  bool two_cores, four_cores;
};

}  // namespace flowtt::cpu
