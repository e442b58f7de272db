#include <immintrin.h>

#include "cpu/kernels.h"
#include "flowtt/rounding.h"

namespace flowtt::cpu {
namespace {

constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#define FLOWTT_BROADCASTS_GROUPS
// G elements, again and again.
template <int G>
inline __attribute__((always_inline)) __m512 broadcast_group(const float* p) {
  static_assert(G == 2 || G == 4 || G == 8, "no such group");
  // The masked forms: GCC 12 takes the unused operand inside the plain ones for uninitialised.
  constexpr __mmask16 kAll = 0xffff;
  if constexpr (G == 2) {
    const __m128d pair = _mm_load_sd(reinterpret_cast<const double*>(p));
    return _mm512_castpd_ps(_mm512_maskz_broadcastsd_pd(static_cast<__mmask8>(kAll), pair));
  }
  if constexpr (G == 4) return _mm512_maskz_broadcast_f32x4(kAll, _mm_loadu_ps(p));
  if constexpr (G == 8) return _mm512_maskz_broadcast_f32x8(kAll, _mm256_loadu_ps(p));
}

#define FLOWTT_HAS_PIECES
// Four elements from each of four places, `step` apart.
inline __attribute__((always_inline)) __m512 load_pieces(const float* p, int64_t step) {
  __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(p));
  x = _mm512_insertf32x4(x, _mm_loadu_ps(p + step), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps(p + 2 * step), 2);
  return _mm512_insertf32x4(x, _mm_loadu_ps(p + 3 * step), 3);
}

#define FLOWTT_STREAMS
inline __attribute__((always_inline)) void stream_aligned(float* p, __m512 x) { _mm512_stream_ps(p, x); }

#define FLOWTT_WIDENS_WORDS
// 16 numbers of 16 bits, each in 32.
typedef uint32_t WidenedWords __attribute__((vector_size(64)));
inline __attribute__((always_inline)) WidenedWords widen_words(const uint16_t* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<WidenedWords>(_mm512_maskz_cvtepu16_epi32(0xffff, words));
}

#include "cpu/kernels.inc"
#if FLOWTT_AMX
#include "cpu/tiles.inc"
#endif

}  // namespace

extern const InstructionSet kAvx512;
const InstructionSet kAvx512 = {
    "avx512", kKeyKernels, kKernels<float>, kReducedKernels<Bfloat16>, kReducedKernels<Float16>, nullptr};
#if FLOWTT_AMX
extern const InstructionSet kAmx;
const InstructionSet kAmx = {
    "amx", kKeyKernels, kKernels<float>, kReducedKernels<Bfloat16>, kReducedKernels<Float16>, &kTileKernels};
#endif

}  // namespace flowtt::cpu
