// Elements of cores as kernels read them: floats, or 16 bits that are widened where they are used.
#pragma once

#include "flowtt/platform.cuh"
#include "flowtt/rounding.h"

namespace flowtt {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class Element>
constexpr bool kIsFloat = sizeof(Element) == sizeof(float);

FLOWTT_INLINE float widen(float x) { return x; }
FLOWTT_INLINE float widen(Bfloat16 x) { return from_bfloat16(x.bits); }
FLOWTT_INLINE float widen(Float16 x) {
#ifdef FLOWTT_CUDA_EMULATION
  return from_float16(x.bits);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#endif
}

// Elements that no kernel writes meanwhile.
FLOWTT_INLINE float read(const float* p) { return __ldg(p); }
template <class Element, class = std::enable_if_t<!kIsFloat<Element>>>
FLOWTT_INLINE float read(const Element* p) {
  return widen(Element{__ldg(&p->bits)});
}

// Four neighbours; p is a multiple of four elements.
template <class Element, class = std::enable_if_t<!kIsFloat<Element>>>
FLOWTT_INLINE float4 load4(const Element* p) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(p);
  const auto at = [](uint32_t bits) { return widen(Element{static_cast<uint16_t>(bits)}); };
  return make_float4(at(pairs.x), at(pairs.x >> 16), at(pairs.y), at(pairs.y >> 16));
}

// To shared memory, asynchronously: commit and wait.
template <class Element>
FLOWTT_INLINE void copy4(Element* to, const Element* from) {
  __pipeline_memcpy_async(to, from, 4 * sizeof(Element));
}
// One element; hardware copies at least four bytes by itself.
FLOWTT_INLINE void copy1(float* to, const float* from) { __pipeline_memcpy_async(to, from, 4); }
template <class Element, class = std::enable_if_t<!kIsFloat<Element>>>
FLOWTT_INLINE void copy1(Element* to, const Element* from) {
  *to = *from;
}
// As floats: asynchronous only if they are floats already.
template <class Element, class = std::enable_if_t<!kIsFloat<Element>>>
FLOWTT_INLINE void copy4(float* to, const Element* from) {
  store4(to, load4(from));
}
template <class Element, class = std::enable_if_t<!kIsFloat<Element>>>
FLOWTT_INLINE void copy1(float* to, const Element* from) {
  *to = widen(*from);
}

// How a new value becomes an element `i` of the weights: to the nearest, or stochastically where there is a seed.
struct Rounding {
  int64_t seed;  // of this step; -1: none

  FLOWTT_INLINE void store(float* to, int64_t, float value) const { *to = value; }
  FLOWTT_INLINE void store(Bfloat16* to, int64_t i, float value) const {
    to->bits = seed < 0 ? bfloat16_to_nearest(value) : bfloat16_stochastic(value, random(i));
  }
  FLOWTT_INLINE void store(Float16* to, int64_t i, float value) const {
    to->bits = seed < 0 ? float16_to_nearest(value) : float16_stochastic(value, random(i));
  }

 private:
  FLOWTT_INLINE uint32_t random(int64_t i) const {
    return random_bits(static_cast<uint64_t>(seed), static_cast<uint64_t>(i));  // [mutant: constant-bits]
  }
};

}  // namespace flowtt
