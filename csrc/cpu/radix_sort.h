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

// Sorts `n` items by the lowest `key_bits` bits of their keys, least significant digit first. Returns the sorted items,
// which are in `items` or in `spare`.
template <class Item>
Item* radix_sort(const Executor& executor, int64_t num_tasks, int key_bits, int64_t n, Item* items, Item* spare) {
  // Wider digits need fewer passes over the items, and more counters: those should stay in the first-level cache, and
  // clearing them should cost less than a pass.
  const int widest = n < 4096 ? 8 : n < 200000 ? 12 : 11;
  const int passes = (key_bits + widest - 1) / widest;
  if (passes == 0 || n < 2) return items;
  const int width = (key_bits + passes - 1) / passes;
  const int64_t buckets = int64_t{1} << width;
  const uint64_t mask = static_cast<uint64_t>(buckets - 1);
  std::vector<uint32_t> counts(static_cast<size_t>(num_tasks * buckets));
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * width;
    executor.run(num_tasks, [&](int64_t task) {
      uint32_t* count = counts.data() + task * buckets;
      std::fill(count, count + buckets, 0u);
      const int64_t end = even_cut(n, task + 1, num_tasks);
      for (int64_t i = even_cut(n, task, num_tasks); i < end; ++i) ++count[items[i].key() >> shift & mask];
    });
    // From counts to places: a task's items of a bucket follow those of earlier tasks.
    uint32_t place = 0;
    for (int64_t bucket = 0; bucket < buckets; ++bucket) {
      for (int64_t task = 0; task < num_tasks; ++task) {
        place += std::exchange(counts[static_cast<size_t>(task * buckets + bucket)], place);
      }
    }
    executor.run(num_tasks, [&](int64_t task) {
      uint32_t* places = counts.data() + task * buckets;
      const int64_t end = even_cut(n, task + 1, num_tasks);
      for (int64_t i = even_cut(n, task, num_tasks); i < end; ++i) {
        const Item item = items[i];
        spare[places[item.key() >> shift & mask]++] = item;
      }
    });
    std::swap(items, spare);
  }
  return items;
}

}  // namespace flowtt::cpu
