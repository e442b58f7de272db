#include "cpu/kernels.h"

namespace flowtt::cpu {
namespace {

constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#include "cpu/kernels.inc"

}  // namespace

extern const InstructionSet kAvx512;
const InstructionSet kAvx512 = {"avx512", kKeyKernels, kKernels<float>};

}  // namespace flowtt::cpu
