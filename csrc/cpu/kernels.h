// The inner loops, as tables of functions: one table for each instruction set that they are compiled for.
//
// The files that define them are compiled with instructions that this machine may not have. They must therefore include
// nothing but plain data like this header: an inline function or template that other files use as well would be emitted
// there too, and the linker could keep that copy for everybody.
#pragma once

#include <cstdint>

#include "flowtt/plan.h"

// Whether there are kernels for tile registers: the compiler must know them, and the system must be asked for them.
#if FLOWTT_X86 && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define FLOWTT_AMX 1
#else
#define FLOWTT_AMX 0
#endif

namespace flowtt::cpu {

// How the row number of one table becomes a key. Digits are in `p`'s radix, the last one least significant.
struct KeyRule {
  int num_cores;
  int64_t num_embeddings;
  int64_t p[4];
  int shift[4];
  int64_t table_bits;  // the table's number, already shifted
};

// The product that makes a row: [m, r] (the flow's prefix product) times [r, q] (a slice of the last core). In buffers
// r is padded with zeros to r_padded.
struct RowShape {
  int64_t m;
  int64_t q;
  int64_t r;
  int64_t r_padded;
};

// How a row gets to where it belongs.
enum class Put : int {
  kWrite,
  kAdd,
  kStream,  // past the caches where whole vectors are aligned; visible to other threads after the writer's next fence
};

struct KeyKernels {
  // keys[i] = key of indices[i]; a row number out of range counts and becomes row 0. Returns the count.
  int64_t (*from_int32)(const KeyRule& rule, const int32_t* indices, int64_t n, int64_t* keys);
  int64_t (*from_int64)(const KeyRule& rule, const int64_t* indices, int64_t n, int64_t* keys);
};

template <class T>
struct RowKernels {
  // out[i] [m, q] = c [m, r_padded] * last[i] [r, q], for n rows of one flow. `scratch` is
  // [(m rounded up to 16) * r_padded + 16 * (m + r)].
  void (*forward)(const RowShape& shape, const T* c, int64_t n, const T* const* last, T* const* out, T* scratch);

  // For n rows of one flow with gradients g[i] [m, q]:
  //   grad_last[i] [q, r_padded] (+)= g[i]^T * c, added where touched[i], else written;
  //   grad_c [m, r_padded] (+)= sum over i of g[i] * last[i], last[i] being [q, r_padded], added where `accumulate`.
  void (*backward)(const RowShape& shape, const T* c, int64_t n, const T* const* g, const T* const* last,
                   T* const* grad_last, const bool* touched, T* grad_c, bool accumulate);
};

template <class T>
struct Kernels {
  // Ranks are padded to a multiple of this many elements in buffers.
  int64_t rank_multiple;

  RowKernels<T> (*rows)(const RowShape& shape);

  // c [m, n] (+)= a [m, k] * b [k, n], with a(i, j) = a[i * a_row + j * a_col] and rows of b and c `ldb`, `ldc` apart.
  void (*gemm)(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t ldb, T* c,
               int64_t ldc, bool accumulate);

  // to [cols, rows] = from [rows, cols]^T, rows `ld_to` and `ld_from` apart.
  void (*transpose)(int64_t rows, int64_t cols, const T* from, int64_t ld_from, T* to, int64_t ld_to);

  // out [dim] (+)= sum over i of scales[i] * rows[i] [dim]; no scales means 1.
  void (*sum_rows)(int64_t n, const T* const* rows, const T* scales, int64_t dim, T* out, bool accumulate);

  // out[i] [dim] (+)= scales[i] * row [dim], for n of them in turn; no scales means 1. `row` may be out[0] if n is 1.
  void (*spread_row)(int64_t n, T* const* out, const T* scales, int64_t dim, const T* row, Put put);

  T (*dot)(int64_t dim, const T* a, const T* b);

  // Updates a slice `w` [n] with gradient `g` [n]. `momentum1` is [n], but [1] for row-wise Adagrad; `momentum2` is
  // [n].
  void (*update)(const UpdateRule<T>& rule, int64_t n, const T* g, T* w, T* momentum1, T* momentum2);
};

// Cores stored in 16 bits, as bfloat16 or float16.
template <class T>
struct ReducedKernels {
  void (*widen)(int64_t n, const uint16_t* from, T* to);

  // Rounds to nearest if `rounding_seed` is negative, else stochastically as flowtt/rounding.h, for the elements of the
  // weights from `first_element` on.
  void (*round)(int64_t n, const T* from, int64_t rounding_seed, int64_t first_element, uint16_t* to);
};

// Products of tables of three cores in bfloat16, as matrices of 32 rows, on tile registers. `left` is [32, left_pitch],
// of which left_rank columns count and the others are zeros; the middle slice is [left_rank, columns].
template <class T>
struct TileKernels {
  static constexpr int64_t kRows = 32;

  bool (*fits)(int64_t left_rank, int64_t columns);

  // Brings a middle slice into the form that `multiply` reads, [left_rank / 2, columns], and into that of `backward`,
  // [columns / 2, left_rank]; `scratch` is as large.
  void (*pack)(int64_t left_rank, int64_t columns, const uint16_t* slice, uint32_t* packed);
  void (*pack_transposed)(int64_t left_rank, int64_t columns, const uint16_t* slice, uint32_t* packed,
                          uint32_t* scratch);

  // c = left * slice, for the first `rows` rows and some more. `packed` has left_pitch / 2 rows.
  void (*multiply)(int64_t rows, int64_t left_pitch, int64_t columns, const uint16_t* left, const uint32_t* packed,
                   T* c);

  // grad_left [32, left_rank] = grad_c * slice^T;  grad_middle [left_rank, columns] (+)= left^T * grad_c. `grad_c`
  // [32, columns] is cleared from row `rows` on. `scratch` is [32 * left_rank].
  void (*backward)(int64_t rows, int64_t left_rank, int64_t left_pitch, int64_t columns, const uint16_t* left,
                   const uint32_t* packed_transposed, T* grad_c, T* grad_left, T* grad_middle, bool accumulate,
                   uint32_t* scratch);
};

struct InstructionSet {
  const char* name;
  KeyKernels keys;
  Kernels<float> f32;
  ReducedKernels<float> bfloat16, float16;
  const TileKernels<float>* tiles;  // null where there are none
};

}  // namespace flowtt::cpu
