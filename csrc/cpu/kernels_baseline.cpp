#include "cpu/kernels.h"
#include "flowtt/rounding.h"

namespace flowtt::cpu {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#include "cpu/kernels.inc"

}  // namespace

extern const InstructionSet kBaseline;
const InstructionSet kBaseline = {
    "baseline", kKeyKernels, kKernels<float>, kReducedKernels<Bfloat16>, kReducedKernels<Float16>, nullptr};

extern const Kernels<double> kBaselineDouble;
const Kernels<double> kBaselineDouble = kKernels<double>;

}  // namespace flowtt::cpu
