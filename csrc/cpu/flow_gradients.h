// Gradients of the flows of one table that one task has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/gradient_sink.h"
#include "cpu/kernels.h"
#include "cpu/lookup.h"
#include "cpu/outer_gradients.h"
#include "cpu/partition.h"
#include "cpu/prefetch.h"
#include "cpu/prefix_products.h"
#include "cpu/row_gradients.h"

namespace flowtt::cpu {

// The gradient of a middle slice that other tasks have flows of, too.
template <class T>
struct PartialMiddle {
  int64_t segment;
  int64_t slice;
  Buffer<T> gradient;  // [left_rank, middle_q, rank_padded]
};

// Walks over flows in key order. With C the prefix product of a flow and g the gradient of one of its rows:
//   grad last += C^T g,  grad C += g last^T;  then for a block of flows:  grad left = grad C * middle^T,
//   grad middle += left^T * grad C.
// The middle slice's gradient is complete when its last flow is done, and goes to the sink unless a neighbour task
// shares it. Those of the outer cores stay here, to be summed over tasks.
template <class T>
class FlowGradients {
 public:
  // Rows of `left` of the flows of one middle slice that are taken together.
  static constexpr int64_t kBlockRows = 36;
  static constexpr int64_t kRowBlock = 8;  // rows of a flow taken together

  // Scratch memory is `arena`'s, that of what `run` returns is `kept`'s.
  FlowGradients(const Kernels<T>& kernels, Arena* arena, Arena* kept, const Lookup<T>& lookup,
                const RowGradients<T>& rows, const GradientSink<T>& sink, const Segment& segment, int64_t begin,
                int64_t end)
      : kernels_(kernels),
        lookup_(lookup),
        plan_(lookup.plan),
        rows_(rows),
        sink_(sink),
        segment_(segment),
        begin_(begin),
        end_(end),
        last_row_(plan_.flow_starts[end]),
        table_(lookup.tables[segment.table]),
        geometry_(table_, kernels.rank_multiple),
        shape_(geometry_.row_shape()),
        row_kernels_(kernels.rows(shape_)),
        product_block_(flows_at_once(lookup.weights, geometry_)),
        block_(lookup.weights.tiles(geometry_) != nullptr ? product_block_ : geometry_.flows_of_rows(kBlockRows)),
        outer_(table_, geometry_),
        last_is_far_(
            is_far(table_.p[table_.last()] * outer_[OuterCores::kLast].stride() * static_cast<int64_t>(sizeof(T)))),
        products_(kernels, arena, lookup.weights, table_, geometry_, block_, product_block_),
        row_gradients_(arena->take<T>(kRowBlock * geometry_.dim)),
        grad_middle_(arena->take<T>(geometry_.middle_size())),
        middle_slice_(arena->take<T>(table_.slice_size(table_.middle()))) {
    if (products_.tiles() != nullptr) {
      constexpr int64_t kRows = TileKernels<T>::kRows;
      grad_c_ = arena->take<T>(kRows * geometry_.middle_columns);
      grad_left_ = arena->take<T>(kRows * geometry_.left_rank);
      packed_transposed_ = arena->take<uint32_t>(geometry_.middle_columns / 2 * geometry_.left_rank);
      tile_scratch_ = arena->take<uint32_t>(std::max(geometry_.middle_columns / 2, kRows) * geometry_.left_rank);
    } else if (!geometry_.two_cores) {
      grad_c_ = arena->take<T>(block_ * geometry_.c_size());
      grad_left_ = arena->take<T>(block_ * geometry_.left_rows * geometry_.left_rank_padded);
      const int64_t size = geometry_.middle_columns * geometry_.left_rank_padded;
      middle_transposed_ = arena->take<T>(size);
      std::fill_n(middle_transposed_, size, T(0));  // padding stays 0
    }
    if (lookup.weights.reduced()) {
      widened_ = arena->take<T>(kRowBlock * table_.slice_size(table_.last()));
    }
    if (rows.wants_factors()) {
      made_rows_ = arena->take<T>(kRowBlock * geometry_.dim);
      scratch_ = arena->take<T>(geometry_.scratch_size());
    }
    const int64_t num_flows = end - begin, num_rows = plan_.flow_starts[end] - plan_.flow_starts[begin];
    for (int i = 0; i < outer_.size(); ++i) {
      const OuterCore& core = outer_[i];
      touched_[i] =
          TouchedSlices<T>(kept, table_.p[core.core], i == OuterCores::kLast ? num_rows : num_flows, core.stride());
    }
  }

  // Does all of it, once. Shared middle slices are appended to `partial`. Returns the outer cores' gradients, in the
  // order of OuterCores.
  OuterGradients<T> run(int64_t segment_number, std::vector<PartialMiddle<T>>* partial) {
    for (int64_t flow = begin_; flow < end_;) {
      const int64_t first_flow = flow, key = key_of(flow), middle = table_.middle_key(key);
      const int64_t middle_end = end_of_middle(table_, plan_, flow, end_);
      start_middle(key, middle_end - flow, middle_end < end_ ? key_of(middle_end) : -1);
      for (; flow < middle_end; flow = std::min(flow + block_, middle_end)) {
        take_block(flow, std::min(block_, middle_end - flow), flow > first_flow);
      }
      const bool shared = (first_flow > segment_.flow_begin && table_.middle_key(key_of(first_flow - 1)) == middle) ||
                          (flow < segment_.flow_end && table_.middle_key(key_of(flow)) == middle);
      const int64_t slice = table_.digit(key, table_.middle());
      if (shared) {
        const auto size = static_cast<size_t>(geometry_.middle_size());
        partial->push_back({segment_number, slice, Buffer<T>(size)});
        std::copy_n(grad_middle_, size, partial->back().gradient.data());
      } else {
        sink_.take(table_, table_.middle(), slice, middle_gradient(geometry_, grad_middle_, middle_slice_));
      }
    }
    return touched_;
  }

  // The gradient of a middle slice without padding, in `spare` [slice_size] if need be.
  static const T* middle_gradient(const Geometry& g, const T* padded, T* spare) {
    if (g.rank == g.rank_padded) return padded;
    for (int64_t i = 0; i < g.left_rank * g.middle_q; ++i) {
      std::copy_n(padded + i * g.rank_padded, g.rank, spare + i * g.rank);
    }
    return spare;
  }

 private:
  int64_t key_of(int64_t flow) const { return plan_.row_keys[plan_.flow_starts[flow]]; }

  void start_middle(int64_t key, int64_t flows, int64_t next_key) {
    products_.set_middle(key, flows, next_key);
    if (geometry_.two_cores) return;
    if (const TileKernels<T>* tiles = products_.tiles()) {
      tiles->pack_transposed(geometry_.left_rank, geometry_.middle_columns, products_.reduced_middle(),
                             packed_transposed_, tile_scratch_);
      return;
    }
    kernels_.transpose(geometry_.left_rank, geometry_.middle_columns, products_.middle(), geometry_.middle_columns,
                       middle_transposed_, geometry_.left_rank_padded);
  }

  // Flows [flow, flow + n) of the current middle slice.
  void take_block(int64_t flow, int64_t n, bool accumulate) {
    for (int64_t i = 0; i < n; ++i) products_.set_left(i, key_of(flow + i));
    const Geometry& g = geometry_;
    if (g.two_cores) {  // C is the middle slice
      for (int64_t i = 0; i < n; ++i) take_rows(flow + i, products_.c(0), grad_middle_, accumulate || i > 0);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      if (i % product_block_ == 0) products_.multiply(i, std::min(product_block_, n - i));
      take_rows(flow + i, products_.c(i % product_block_), grad_c_ + i * g.c_size(), false);
    }
    const int64_t rows = n * g.left_rows;
    if (const TileKernels<T>* tiles = products_.tiles()) {
      tiles->backward(rows, g.left_rank, products_.left_pitch(), g.middle_columns, products_.reduced_left(),
                      packed_transposed_, grad_c_, grad_left_, grad_middle_, accumulate, tile_scratch_);
    } else {
      kernels_.gemm(rows, g.left_rank_padded, g.middle_columns, grad_c_, g.middle_columns, 1, middle_transposed_,
                    g.left_rank_padded, grad_left_, g.left_rank_padded, false);
      kernels_.gemm(g.left_rank, g.middle_columns, rows, products_.left(0), 1, g.left_rank, grad_c_, g.middle_columns,
                    grad_middle_, g.middle_columns, accumulate);
    }
    for (int64_t i = 0; i < n; ++i) {
      take_left(key_of(flow + i), grad_left_ + i * g.left_rows * g.left_rank_padded);
    }
  }

  // All rows of a flow: gradients of the last core, and of C to `grad_c`.
  void take_rows(int64_t flow, const T* c, T* grad_c, bool accumulate) {
    const int64_t last_core = table_.core_offset[table_.last()], last_size = table_.slice_size(table_.last());
    const OuterCore& core = outer_[OuterCores::kLast];
    const int64_t end = plan_.flow_starts[flow + 1];
    for (int64_t row = plan_.flow_starts[flow]; row < end; row += kRowBlock) {
      const int64_t n = std::min(kRowBlock, end - row);
      for (int64_t ahead = row + kPrefetch; ahead < std::min(row + kPrefetch + n, last_row_); ++ahead) {
        prefetch_row(ahead);
      }
      const T *g[kRowBlock], *copies[kRowBlock], *last[kRowBlock];
      T *gradients[kRowBlock], *made[kRowBlock];
      bool touched[kRowBlock];
      for (int64_t i = 0; i < n; ++i) {
        const int64_t digit = table_.digit(plan_.row_keys[row + i], table_.last());
        const auto found = touched_[OuterCores::kLast].touch(digit);
        gradients[i] = found.data;
        touched[i] = found.touched;
        T* copy = found.data + core.gradient_size();
        if (rows_.wants_factors() || !found.touched) {
          last[i] = lookup_.weights.read(last_core + digit * last_size, last_size, widened_ + i * last_size);
        }
        if (!found.touched) copy_last(last[i], copy);
        copies[i] = copy;
        g[i] = rows_.of_row(segment_.table, row + i, row_gradients_ + i * geometry_.dim);
      }
      if (rows_.wants_factors()) {
        for (int64_t i = 0; i < n; ++i) made[i] = made_rows_ + i * geometry_.dim;
        row_kernels_.forward(shape_, c, n, last, made, scratch_);
        for (int64_t i = 0; i < n; ++i) rows_.take_factors(segment_.table, row + i, made[i]);
      }
      row_kernels_.backward(shape_, c, n, g, copies, gradients, touched, grad_c, accumulate);
      accumulate = true;
    }
  }

  // Asks for what take_rows reads of a row, and for what finds the bag of a row further on.
  FLOWTT_PREFETCHING void prefetch_row(int64_t row) const {
    const int64_t further = std::min(row + kPrefetch, last_row_ - 1);
    prefetch(plan_.bags + plan_.lookups[plan_.row_starts[further]], 1);
    if (last_is_far_) {
      const T* slot = touched_[OuterCores::kLast].find(table_.digit(plan_.row_keys[row], table_.last()));
      if (slot != nullptr) prefetch_far(slot, outer_[OuterCores::kLast].stride());
    }
    prefetch(rows_.of_bag(segment_.table, plan_.lookups[plan_.row_starts[row]]), geometry_.dim);
  }

  // Slice [rank, q] of the last core, transposed and padded to [q, rank_padded].
  void copy_last(const T* slice, T* copy) const {
    if (geometry_.rank < geometry_.rank_padded) std::fill_n(copy, geometry_.last_size(), T(0));
    kernels_.transpose(geometry_.rank, geometry_.q, slice, geometry_.q, copy, geometry_.rank_padded);
  }

  // From the gradient of `left` [left_rows, left_rank_padded] of a flow to those of the cores before the middle one.
  void take_left(int64_t key, const T* grad_left) {
    const Geometry& g = geometry_;
    const auto first = touched_[OuterCores::kFirst].touch(table_.digit(key, 0));
    if (!g.four_cores) {
      kernels_.sum_rows(1, &grad_left, nullptr, outer_[OuterCores::kFirst].gradient_size(), first.data, first.touched);
      return;
    }
    const int64_t q0 = table_.q[0], r1 = table_.r[1], columns = table_.q[1] * g.left_rank_padded;
    const auto second = touched_[OuterCores::kSecond].touch(table_.digit(key, 1));
    T* second_transposed = second.data + outer_[OuterCores::kSecond].gradient_size();
    if (!second.touched) copy_second(products_.second(key), second_transposed);
    kernels_.gemm(q0, g.first_rank_padded, columns, grad_left, columns, 1, second_transposed, g.first_rank_padded,
                  first.data, g.first_rank_padded, first.touched);
    kernels_.gemm(r1, columns, q0, products_.first(key), 1, r1, grad_left, columns, second.data, columns,
                  second.touched);
  }

  // Slice [r_1, q_2, r_2] of the second core, transposed and padded to [q_2, left_rank_padded, first_rank_padded].
  void copy_second(const T* slice, T* copy) const {
    const Geometry& g = geometry_;
    const int64_t r1 = table_.r[1], q1 = table_.q[1], r2 = table_.r[2];
    std::fill_n(copy, q1 * g.left_rank_padded * g.first_rank_padded, T(0));
    for (int64_t j = 0; j < q1; ++j) {
      kernels_.transpose(r1, r2, slice + j * r2, q1 * r2, copy + j * g.left_rank_padded * g.first_rank_padded,
                         g.first_rank_padded);
    }
  }

  static constexpr int64_t kPrefetch = 8;  // rows between asking for memory and using it

  const Kernels<T>& kernels_;
  const Lookup<T>& lookup_;
  const FlowPlan& plan_;
  const RowGradients<T>& rows_;
  const GradientSink<T>& sink_;
  const Segment& segment_;
  const int64_t begin_, end_;
  const int64_t last_row_;
  const Table& table_;
  const Geometry geometry_;
  const RowShape shape_;
  const RowKernels<T> row_kernels_;
  const int64_t product_block_;  // flows whose prefix products are made at once
  const int64_t block_;          // flows taken together
  const OuterCores outer_;
  const bool last_is_far_;
  PrefixProducts<T> products_;
  OuterGradients<T> touched_;
  T* row_gradients_;                       // [kRowBlock, dim]
  T* grad_c_ = nullptr;                    // [block, m, rank_padded]
  T* grad_left_ = nullptr;                 // [block, left_rows, left_rank_padded]
  T* middle_transposed_ = nullptr;         // [middle_columns, left_rank_padded]
  T* grad_middle_;                         // [left_rank, middle_columns]
  T* middle_slice_;                        // grad_middle_ without padding
  T* made_rows_ = nullptr;                 // [kRowBlock, dim]
  T* scratch_ = nullptr;                   // of the row kernels
  T* widened_ = nullptr;                   // [kRowBlock] slices of the last core
  uint32_t* packed_transposed_ = nullptr;  // the middle slice for tiles
  uint32_t* tile_scratch_ = nullptr;
};

}  // namespace flowtt::cpu
