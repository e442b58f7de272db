// bfloat16 and float16 numbers as 16 bits: widening to float, and rounding to nearest or stochastically.
//
// flowtt_torchrec/precision.py defines stochastic rounding; the bits here are the same. Everything is integer
// arithmetic without branches, so that compilers can vectorise it, and `static`, so that files compiled for different
// instruction sets share nothing.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FLOWTT_ROUNDING static __host__ __device__ __forceinline__
#else
#define FLOWTT_ROUNDING static inline __attribute__((always_inline))
#endif

namespace flowtt {

// How elements of cores are stored.
enum class Storage : int { kFloat32, kFloat64, kBfloat16, kFloat16 };

FLOWTT_ROUNDING uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
FLOWTT_ROUNDING float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr int64_t kRoundingSeeds = int64_t{1} << 24;  // different ones, as flowtt_torchrec/precision.py has them

// A step of splitmix64 makes 16 random bits for each of four neighbouring elements of the weights, the first's lowest.
constexpr uint64_t kRandomElements = 4;
FLOWTT_ROUNDING uint64_t random_word(uint64_t seed, uint64_t word) {
  uint64_t x = (seed << 40) + word + 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
// 16 random bits for one element.
FLOWTT_ROUNDING uint32_t random_bits(uint64_t seed, uint64_t element) {
  return random_word(seed, element / kRandomElements) >> (16 * (element % kRandomElements)) & 0xffffu;
}

FLOWTT_ROUNDING float from_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

FLOWTT_ROUNDING float from_float16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 224u << 23 : 112u << 23);  // infinite, NaN: 255
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | (magnitude < 0x400u ? small : normal));
}

FLOWTT_ROUNDING uint16_t bfloat16_to_nearest(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? bits >> 16 | 0x40u : nearest);
}

FLOWTT_ROUNDING uint16_t bfloat16_stochastic(float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return finite ? static_cast<uint16_t>((bits + random) >> 16) : bfloat16_to_nearest(x);
}

// From the bits of a positive float of at least 2^-14 whose low 13 bits do not count.
FLOWTT_ROUNDING uint32_t normal_float16(uint32_t bits) {
  return bits >= 0x47800000u ? 0x7c00u : (bits - (112u << 23)) >> 13;
}
FLOWTT_ROUNDING uint16_t join_float16(uint32_t bits, uint32_t small, uint32_t normal) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t x = magnitude < 0x38800000u ? small : normal;
  x = magnitude > 0x7f800000u ? 0x7e00u : x;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | x);
}

FLOWTT_ROUNDING uint16_t float16_to_nearest(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  // Below 2^-14 in units of 2^-24; the sum with 2^23 rounds to a whole number.
  const uint32_t small = bits_of(float_of(magnitude) * 0x1p24f + 0x1p23f) - bits_of(0x1p23f);
  return join_float16(bits, small, normal_float16(magnitude + 0xfffu + (magnitude >> 13 & 1u)));
}

FLOWTT_ROUNDING uint16_t float16_stochastic(float x, uint32_t random) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const float units = magnitude < 0x38800000u ? float_of(magnitude) * 0x1p24f : 0.0f;
  const int32_t below = static_cast<int32_t>(units);
  const float fraction = units - static_cast<float>(below);
  const bool up = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-16f < fraction;
  const uint32_t small = static_cast<uint32_t>(below + static_cast<int32_t>(up));
  return join_float16(bits, small, normal_float16(magnitude + (random & 0x1fffu)));
}

}  // namespace flowtt
