// Stable sort of keys that carry their position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/executor.h"

namespace flowtt::cpu {

// A key of up to 32 bits and its position.
class ShortItem {
 public:
  static constexpr int kKeyBits = 32;

  ShortItem() = default;
  ShortItem(uint64_t key, uint32_t position) : bits_(key << 32 | position) {}
  uint64_t key() const { return bits_ >> 32; }
  uint32_t position() const { return static_cast<uint32_t>(bits_); }

 private:
  uint64_t bits_;
};

// A key of up to 64 bits and its position.
class LongItem {
 public:
  static constexpr int kKeyBits = 64;

  LongItem() = default;
  LongItem(uint64_t key, uint32_t position) : key_(key), position_(position) {}
  uint64_t key() const { return key_; }
  uint32_t position() const { return position_; }

 private:
  uint64_t key_;
  uint32_t position_;
};

// Sorts items by the lowest bits of their keys, least significant digit first.
class RadixSort {
 public:
  // For `n` items with keys of `key_bits` bits, shared out evenly over `num_tasks` tasks.
  RadixSort(int64_t num_tasks, int key_bits, int64_t n)
      // Wider digits need fewer passes over the items, and more counters; clearing those should cost less than a pass.
      : num_tasks_(num_tasks), n_(n), passes_(passes(key_bits, n < 4096 ? 8 : 12)) {
    width_ = passes_ == 0 ? 0 : (key_bits + passes_ - 1) / passes_;
    counts_.resize(static_cast<size_t>(num_tasks * buckets()));
  }

  // Counts items of one task, `count` of them, towards the first pass. Every item must be counted before `sort`.
  template <class Item>
  void count(int64_t task, const Item* items, int64_t count) {
    count_digits(counts_.data() + task * buckets(), items, count, 0);
  }

  // Returns the sorted items, which are in `items` or in `spare`.
  template <class Item>
  Item* sort(const Executor& executor, Item* items, Item* spare) {
    for (int pass = 0; pass < passes_; ++pass) {
      const int shift = pass * width_;
      if (pass > 0) {
        executor.run(num_tasks_, [&](int64_t task) {
          uint32_t* counts = counts_.data() + task * buckets();
          std::fill(counts, counts + buckets(), 0u);
          count_digits(counts, items + begin(task), begin(task + 1) - begin(task), shift);
        });
      }
      // From counts to places: a task's items of a bucket follow those of earlier tasks.
      uint32_t place = 0;
      for (int64_t bucket = 0; bucket < buckets(); ++bucket) {
        for (int64_t task = 0; task < num_tasks_; ++task) {
          place += std::exchange(counts_[static_cast<size_t>(task * buckets() + bucket)], place);
        }
      }
      executor.run(num_tasks_, [&](int64_t task) {
        uint32_t* places = counts_.data() + task * buckets();
        const uint64_t mask = static_cast<uint64_t>(buckets() - 1);
        for (int64_t i = begin(task); i < begin(task + 1); ++i) {
          const Item item = items[i];
          spare[places[item.key() >> shift & mask]++] = item;
        }
      });
      std::swap(items, spare);
    }
    return items;
  }

 private:
  static int passes(int key_bits, int widest) { return (key_bits + widest - 1) / widest; }

  int64_t buckets() const { return int64_t{1} << width_; }
  int64_t begin(int64_t task) const { return even_cut(n_, task, num_tasks_); }

  template <class Item>
  void count_digits(uint32_t* counts, const Item* items, int64_t count, int shift) const {
    const uint64_t mask = static_cast<uint64_t>(buckets() - 1);
    for (int64_t i = 0; i < count; ++i) ++counts[items[i].key() >> shift & mask];
  }

  const int64_t num_tasks_, n_;
  const int passes_;
  int width_;                     // bits of a digit
  std::vector<uint32_t> counts_;  // [num_tasks, buckets]
};

}  // namespace flowtt::cpu
