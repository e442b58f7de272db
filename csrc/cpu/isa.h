// Which instruction set's kernels run.
#pragma once

#include "cpu/kernels.h"

namespace flowtt::cpu {

// The best instruction set that this machine has, or the one that the environment variable FLOWTT_CPU_ISA names. Throws
// std::runtime_error if that one is unknown, or this machine or build does not have it.
const InstructionSet& instruction_set();

// The kernels for float, and for double, which exists to check gradients and has one plain version.
template <class T>
const Kernels<T>& kernels();

}  // namespace flowtt::cpu
