// Code addresses to file and line, by addr2line of the binutils.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>

#include "runtime.h"

namespace cuda_emulation {
namespace {

// Files whose lines say nothing to a reader: helpers that are inlined into kernels.
bool is_helper(const std::string& line) {
  for (const char* file : {"cuda_emulation.h:", "platform.cuh:", "element.cuh:"}) {
    if (line.find(file) != std::string::npos) return true;
  }
  return false;
}

std::string look_up(void* pc) {
  Dl_info module;
  link_map* map = nullptr;
  if (dladdr1(pc, &module, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) return "?";
  char command[1024];
  // The address is where the hook returns to: the access is before it.
  snprintf(command, sizeof command, "addr2line -Cie '%s' 0x%lx 2>/dev/null", module.dli_fname,
           static_cast<unsigned long>(reinterpret_cast<char*>(pc) - 1 - reinterpret_cast<char*>(map->l_addr)));
  std::string found;
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return "?";
  char text[1024];
  while (fgets(text, sizeof text, pipe) != nullptr) {  // innermost first
    if (found.empty() || is_helper(found)) found = text;
  }
  pclose(pipe);
  found = found.substr(0, found.find(" (discr"));
  while (!found.empty() && found.back() == '\n') found.pop_back();
  return found.empty() ? "?" : found.substr(found.rfind('/') + 1);
}

}  // namespace

std::string source_line(void* pc) {
  static std::unordered_map<void*, std::string> known;
  const auto [line, is_new] = known.try_emplace(pc);
  if (is_new) line->second = look_up(pc);
  return line->second;
}

}  // namespace cuda_emulation
