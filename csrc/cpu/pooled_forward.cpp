#include "cpu/pooled_forward.h"

#include <algorithm>

#include "cpu/bag_sums.h"
#include "cpu/buffer.h"
#include "cpu/geometry.h"
#include "cpu/hot_rows.h"
#include "cpu/isa.h"
#include "cpu/partition.h"
#include "cpu/pooled_rows.h"
#include "cpu/prefetch.h"
#include "cpu/prefix_products.h"
#include "cpu/row_sinks.h"

namespace flowtt::cpu {
namespace {

constexpr int64_t kRowBlock = 8;    // rows of a flow made at once
constexpr int64_t kPrefetch = 16;   // rows between asking for memory and using it
constexpr int64_t kSumBlock = 128;  // rows of a bag summed at once
// An output of this size has left the caches before anyone reads it; what is streamed need not be fetched first.
constexpr int64_t kStreamedBytes = int64_t{16} << 20;

bool has_one_lookup_bags(const Executor& executor, const Batch& batch) {
  const int64_t bags = batch.num_bags();
  if (batch.num_lookups > bags) return false;
  const int64_t num_tasks = executor.num_tasks(bags, 32768);
  std::vector<char> longer(static_cast<size_t>(num_tasks), 0);
  executor.run(num_tasks, [&](int64_t task) {
    const auto search = [&](const auto* offsets) {
      bool found = false;
      const int64_t end = even_cut(bags, task + 1, num_tasks);
      for (int64_t i = even_cut(bags, task, num_tasks); i < end; ++i) found |= offsets[i + 1] - offsets[i] > 1;
      longer[task] = found;
    };
    batch.offsets.wide() ? search(batch.offsets.int64s()) : search(batch.offsets.int32s());
  });
  return std::find(longer.begin(), longer.end(), 1) == longer.end();
}

template <class T>
class Forward {
 public:
  Forward(const Executor& executor, const Lookup<T>& lookup, T* output)
      : executor_(executor),
        lookup_(lookup),
        kernels_(kernels<T>()),
        output_(output),
        pooled_(lookup.tables.size(), lookup.batch, lookup.total_dim),
        hot_(lookup.tables, lookup.plan),
        segments_(rows_are_lookups(lookup.plan) ? segments_by_feature(lookup.batch)
                                                : segments_by_table(lookup.tables, lookup.plan)) {
    int64_t size = 0;
    for (const Segment& segment : segments_) {
      segment_rows_.push_back(size);
      size += (segment.row_end - segment.row_begin) * lookup.tables[segment.table].dim;
    }
    size_of_rows_ = size;
    for (const Table& table : lookup.tables) widest_ = std::max(widest_, table.dim);
    hot_rows_ = Buffer<T>(hot_.rows().size() * widest_);
  }

  void run() {
    if (has_one_lookup_bags(executor_, lookup_.batch)) {
      if (lookup_.batch.num_lookups < lookup_.batch.num_bags()) clear_empty_bags();
      make_rows(cut_rows(), [this](int64_t, int64_t s, int64_t begin, int64_t end, Arena* arena) {
        make_rows_of(segments_[s], begin, end, arena, bag_sink(segments_[s].table));
      });
      spread_hot_rows();
      executor_.lap(Stage::kRows);
      return;
    }
    BagSums<T> sums(executor_, kernels_, lookup_, hot_, hot_rows_.data(), widest_, output_);
    if (sums.copies_size() <= size_of_rows_) {
      add_rows(&sums);
    } else {
      keep_rows();
    }
  }

 private:
  // Every task adds rows to bags as it makes them.
  void add_rows(BagSums<T>* sums) {
    const std::vector<int64_t> cuts = cut_rows();
    sums->start(static_cast<int64_t>(cuts.size()) - 1);
    make_rows(cuts, [&](int64_t task, int64_t s, int64_t begin, int64_t end, Arena* arena) {
      const int64_t table = segments_[s].table;
      const auto place = sums->place(task, table, begin == segments_[s].flow_begin);
      make_rows_of(
          segments_[s], begin, end, arena,
          BagSink<T>(kernels_, lookup_, hot_, hot_rows_.data(), widest_, table, place.bags, *place.rows, Put::kAdd));
    });
    executor_.lap(Stage::kRows);
    sums->finish();
    executor_.lap(Stage::kPooling);
  }

  // For many threads and few lookups a bag: rows are kept until all are there, then every bag sums its own.
  void keep_rows() {
    rows_ = Buffer<T>(static_cast<size_t>(size_of_rows_));
    row_of_lookup_ = Buffer<int32_t>(static_cast<size_t>(lookup_.plan.num_lookups));
    make_rows(cut_rows(), [this](int64_t, int64_t s, int64_t begin, int64_t end, Arena* arena) {
      const Segment& segment = segments_[s];
      make_rows_of(segment, begin, end, arena,
                   BufferSink<T>(lookup_, segment.table, segment.row_begin, rows_.data() + segment_rows_[s],
                                 row_of_lookup_.data()));
    });
    executor_.lap(Stage::kRows);
    pool_rows();
    executor_.lap(Stage::kPooling);
  }

  BagSink<T> bag_sink(int64_t table) const {
    const int64_t bytes = lookup_.batch.batch_size * lookup_.total_dim * static_cast<int64_t>(sizeof(T));
    const bool whole_lines = lookup_.tables[table].dim * sizeof(T) % kAlignment == 0;
    const Put put = whole_lines && bytes >= kStreamedBytes ? Put::kStream : Put::kWrite;
    return {kernels_, lookup_, hot_, hot_rows_.data(), widest_, table, output_, pooled_, put};
  }

  void spread_hot_rows() const {
    const auto count = static_cast<int64_t>(hot_.chunks().size());
    const int64_t num_tasks = count == 0 ? 0 : executor_.num_tasks(count, 1);
    executor_.run(num_tasks, [&](int64_t task) {
      const int64_t end = even_cut(count, task + 1, num_tasks);
      for (int64_t i = even_cut(count, task, num_tasks); i < end; ++i) {
        const HotRows::Chunk& chunk = hot_.chunks()[i];
        const T* row = hot_rows_.data() + chunk.hot * widest_;
        bag_sink(hot_.rows()[chunk.hot].table).spread(chunk.begin, chunk.end, row);
      }
      end_streams();
    });
  }

  void clear_empty_bags() {
    const Batch& batch = lookup_.batch;
    const int64_t num_tasks = executor_.num_tasks(batch.num_bags(), 4096);
    executor_.run(num_tasks, [&](int64_t task) {
      const int64_t end = even_cut(batch.num_bags(), task + 1, num_tasks);
      for (int64_t bag = even_cut(batch.num_bags(), task, num_tasks); bag < end; ++bag) {
        if (batch.offsets[bag] != batch.offsets[bag + 1]) continue;
        const int64_t feature = bag / batch.batch_size;
        std::fill_n(output_ + pooled_.offset_of(feature, bag), lookup_.tables[batch.table(feature)].dim, T(0));
      }
    });
  }

  // Shares flows out over tasks by cost.
  std::vector<int64_t> cut_rows() const {
    std::vector<Cost> costs;
    for (const Table& table : lookup_.tables) {
      const Geometry g(table, kernels_.rank_multiple);
      const double left = g.two_cores ? 0 : static_cast<double>(g.left_size() * g.middle_columns);
      costs.push_back(
          {left / 30 + 60, static_cast<double>(g.c_size() * g.q) / 28 + 30, static_cast<double>(g.dim) / 8 + 4});
    }
    return cut_flows(executor_, segments_, costs, lookup_.plan, hot_);
  }

  // Calls body(task, number of the segment, begin, end, scratch) for every task's flows of every segment.
  template <class Body>
  void make_rows(const std::vector<int64_t>& cuts, const Body& body) const {
    executor_.run(static_cast<int64_t>(cuts.size()) - 1, [&](int64_t task) {
      Arena arena;
      for (size_t s = 0; s < segments_.size(); ++s) {
        const int64_t begin = std::max(cuts[task], segments_[s].flow_begin);
        const int64_t end = std::min(cuts[task + 1], segments_[s].flow_end);
        if (begin >= end) continue;
        arena.clear();
        body(task, static_cast<int64_t>(s), begin, end, &arena);
      }
      end_streams();
    });
  }

  // Rows of flows [begin, end) of a segment.
  template <class Sink>
  void make_rows_of(const Segment& segment, int64_t begin, int64_t end, Arena* arena, const Sink& sink) const {
    const FlowPlan& plan = lookup_.plan;
    const Table& table = lookup_.tables[segment.table];
    const Geometry geometry(table, kernels_.rank_multiple);
    const RowShape shape = geometry.row_shape();
    const RowKernels<T> row_kernels = kernels_.rows(shape);
    const Weights<T>& weights = lookup_.weights;
    const int64_t last_core = table.core_offset[table.last()];
    const int64_t last_size = table.slice_size(table.last());
    const bool last_is_far = is_far(table.p[table.last()] * last_size * weights.element_size());
    const int64_t last_mask = table.digit_mask[table.last()];
    const auto last_slice = [=](int64_t key) { return last_core + (key & last_mask) * last_size; };
    const int64_t block = flows_at_once(weights, geometry);
    PrefixProducts<T> products(kernels_, arena, weights, table, geometry, block, block);
    T* spare = arena->take<T>(kRowBlock * geometry.dim);
    T* scratch = arena->take<T>(geometry.scratch_size());
    T* widened = weights.reduced() ? arena->take<T>(kRowBlock * last_size) : nullptr;

    const int64_t last_row = plan.flow_starts[end];
    const auto key_of = [&](int64_t flow) { return plan.row_keys[plan.flow_starts[flow]]; };
    int64_t prefetched = plan.flow_starts[begin], middle_end = begin;
    for (int64_t flow = begin; flow < end;) {
      if (flow == middle_end) {
        middle_end = end_of_middle(table, plan, flow, end);
        products.set_middle(key_of(flow), middle_end - flow, middle_end < end ? key_of(middle_end) : -1);
      }
      const int64_t n = std::min(block, middle_end - flow);
      for (int64_t i = 0; i < n; ++i) products.set_left(i, key_of(flow + i));
      products.multiply(0, n);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row_end = plan.flow_starts[flow + i + 1];
        for (int64_t row = plan.flow_starts[flow + i]; row < row_end; row += kRowBlock) {
          const int64_t count = std::min(kRowBlock, row_end - row);
          for (const int64_t ahead = std::min(row + count + kPrefetch, last_row); prefetched < ahead; ++prefetched) {
            if (last_is_far) weights.prefetch(last_slice(plan.row_keys[prefetched]), last_size);
            sink.prefetch_row(prefetched);
          }
          const T* last[kRowBlock];
          T* out[kRowBlock];
          for (int64_t j = 0; j < count; ++j) {
            last[j] = weights.read(last_slice(plan.row_keys[row + j]), last_size, widened + j * last_size);
            out[j] = sink.place(row + j, spare + j * geometry.dim);
          }
          row_kernels.forward(shape, products.c(i), count, last, out, scratch);
          for (int64_t j = 0; j < count; ++j) sink.deliver(row + j, out[j]);
        }
      }
      flow += n;
    }
  }

  void pool_rows() {
    const Batch& batch = lookup_.batch;
    const std::vector<int64_t> cuts = cut_bags(executor_, lookup_.tables, batch);
    executor_.run(static_cast<int64_t>(cuts.size()) - 1, [&](int64_t task) {
      for (int64_t feature = 0; feature < batch.num_features; ++feature) {
        const int64_t begin = std::max(cuts[task], feature * batch.batch_size);
        const int64_t end = std::min(cuts[task + 1], (feature + 1) * batch.batch_size);
        if (begin < end) pool_bags(feature, begin, end);
      }
    });
  }

  // Bags [begin, end) of a feature.
  void pool_bags(int64_t feature, int64_t begin, int64_t end) const {
    const Batch& batch = lookup_.batch;
    const int64_t table = batch.table(feature), dim = lookup_.tables[table].dim;
    // All rows of a feature are in one segment.
    const T* rows = nullptr;
    int64_t row_begin = 0;
    if (const int64_t first = batch.start(feature); first < batch.start(feature + 1)) {
      const auto ends_after = [](int64_t row, const Segment& segment) { return row < segment.row_end; };
      const auto s = std::upper_bound(segments_.begin(), segments_.end(), row_of_lookup_[first], ends_after);
      rows = rows_.data() + segment_rows_[s - segments_.begin()];
      row_begin = s->row_begin;
    }
    const T* pointers[kSumBlock];
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t lookups = batch.offsets[bag], lookups_end = batch.offsets[bag + 1];
      T* out = output_ + pooled_.offset_of(feature, bag);
      int64_t at = lookups;
      do {
        const int64_t n = std::min(kSumBlock, lookups_end - at);
        for (int64_t i = 0; i < n; ++i) pointers[i] = rows + (row_of_lookup_[at + i] - row_begin) * dim;
        const T* scales = lookup_.per_sample_weights == nullptr ? nullptr : lookup_.per_sample_weights + at;
        kernels_.sum_rows(n, pointers, scales, dim, out, at > lookups);
        at += n;
      } while (at < lookups_end);
      if (lookup_.pooling_mode == PoolingMode::kMean) take_mean(kernels_, lookups_end - lookups, dim, out);
    }
  }

  const Executor& executor_;
  const Lookup<T>& lookup_;
  const Kernels<T>& kernels_;
  T* output_;
  const PooledRows pooled_;
  const HotRows hot_;
  const std::vector<Segment> segments_;
  std::vector<int64_t> segment_rows_;  // where the rows of each segment start in `rows_`
  int64_t size_of_rows_ = 0;
  Buffer<T> rows_;                 // every distinct row
  Buffer<T> hot_rows_;             // [hot rows, widest]
  int64_t widest_ = 0;             // most columns of a table
  Buffer<int32_t> row_of_lookup_;  // by position
};

}  // namespace

template <class T>
void pooled_forward(const Executor& executor, const Lookup<T>& lookup, T* output) {
  Forward<T>(executor, lookup, output).run();
}

template void pooled_forward<float>(const Executor&, const Lookup<float>&, float*);
template void pooled_forward<double>(const Executor&, const Lookup<double>&, double*);

}  // namespace flowtt::cpu
