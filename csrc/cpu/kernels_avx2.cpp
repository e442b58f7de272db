#include "cpu/kernels.h"

namespace flowtt::cpu {
namespace {

constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#include "cpu/kernels.inc"

}  // namespace

extern const InstructionSet kAvx2;
const InstructionSet kAvx2 = {"avx2", kKeyKernels, kKernels<float>};

}  // namespace flowtt::cpu
