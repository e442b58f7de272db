// Asking for memory before it is needed.
#pragma once

#include <cstdint>

namespace flowtt::cpu {

// Functions that only prefetch need this: they have no effect that compilers know of, which drop calls of them.
#define FLOWTT_PREFETCHING inline __attribute__((always_inline))

// Brings `n` elements to the first-level cache, to be read or written.
template <class T>
FLOWTT_PREFETCHING void prefetch(const T* p, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i);
}

// As `prefetch`, to the second-level cache.
template <class T>
FLOWTT_PREFETCHING void prefetch_far(const T* p, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i, 0, 2);
}

// Whether it pays to ask early for slices of a core of this size, rather than leave it to the second-level cache.
inline bool is_far(int64_t bytes) { return bytes > (int64_t{1} << 20); }

}  // namespace flowtt::cpu
