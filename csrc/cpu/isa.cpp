#include "cpu/isa.h"

#if FLOWTT_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace flowtt::cpu {

extern const InstructionSet kBaseline;
extern const Kernels<double> kBaselineDouble;
#if FLOWTT_X86
extern const InstructionSet kAvx2;
extern const InstructionSet kAvx512;
#endif
#if FLOWTT_AMX
extern const InstructionSet kAmx;
#endif

namespace {

struct Choice {
  const InstructionSet* isa;
  bool (*supported)();
};

#if FLOWTT_X86
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("fma");
}
#endif

#if FLOWTT_AMX
// Asks the system, once, to let this process use tile registers.
bool has_amx() {
  static const bool granted = [] {
    unsigned a, b, c, d = 0;
    constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBfloat16) != 0 && (d & kTiles) != 0 &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted && has_avx512();
}
#endif

// Best first. Each test covers every flag that setup.py compiles the file with.
const Choice kChoices[] = {
#if FLOWTT_AMX
    {&kAmx, has_amx},
#endif
#if FLOWTT_X86
    {&kAvx512, has_avx512},
    {&kAvx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {&kBaseline, [] { return true; }},
};

std::string names(bool supported_only) {
  std::string list;
  for (const Choice& choice : kChoices) {
    if (supported_only && !choice.supported()) continue;
    list += (list.empty() ? "" : ", ") + std::string(choice.isa->name);
  }
  return list;
}

}  // namespace

const InstructionSet& instruction_set() {
  const char* wanted = std::getenv("FLOWTT_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    for (const Choice& choice : kChoices) {
      if (choice.supported()) return *choice.isa;
    }
  }
  for (const Choice& choice : kChoices) {
    if (std::string(wanted) != choice.isa->name) continue;
    if (choice.supported()) return *choice.isa;
    throw std::runtime_error("FLOWTT_CPU_ISA=" + std::string(wanted) +
                             ", but this processor does not have it; it has: " + names(true));
  }
  throw std::runtime_error("FLOWTT_CPU_ISA=" + std::string(wanted) + " is unknown; known: " + names(false));
}

template <>
const Kernels<float>& kernels<float>() {
  return instruction_set().f32;
}

template <>
const Kernels<double>& kernels<double>() {
  return kBaselineDouble;
}

}  // namespace flowtt::cpu
