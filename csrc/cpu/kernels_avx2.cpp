#include <immintrin.h>

#include "cpu/kernels.h"
#include "flowtt/rounding.h"

namespace flowtt::cpu {
namespace {

constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#define FLOWTT_BROADCASTS_GROUPS
// G elements, again and again.
template <int G>
inline __attribute__((always_inline)) __m256 broadcast_group(const float* p) {
  static_assert(G == 1 || G == 2 || G == 4, "no such group");
  if constexpr (G == 1) return _mm256_broadcast_ss(p);
  if constexpr (G == 2) return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
  if constexpr (G == 4) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
}

#define FLOWTT_HAS_PIECES
// Four elements from each of two places, `step` apart.
inline __attribute__((always_inline)) __m256 load_pieces(const float* p, int64_t step) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + step), 1);
}

#define FLOWTT_STREAMS
inline __attribute__((always_inline)) void stream_aligned(float* p, __m256 x) { _mm256_stream_ps(p, x); }

#define FLOWTT_WIDENS_WORDS
// 8 numbers of 16 bits, each in 32.
typedef uint32_t WidenedWords __attribute__((vector_size(32)));
inline __attribute__((always_inline)) WidenedWords widen_words(const uint16_t* p) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<WidenedWords>(_mm256_cvtepu16_epi32(words));
}

#include "cpu/kernels.inc"

}  // namespace

extern const InstructionSet kAvx2;
const InstructionSet kAvx2 = {"avx2", kKeyKernels, kKernels<float>, kReducedKernels<Bfloat16>, kReducedKernels<Float16>,
                              nullptr};

}  // namespace flowtt::cpu
