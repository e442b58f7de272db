// Memory transactions by source line and buffer: 32-byte sectors of global memory, wavefronts of shared memory. Checked
// build.
//
// A warp's request is the n-th access of its lanes at one code address. Lanes that skip an access shift the count, so
// ratios above 1 at divergent lines may be too high. Widths are those of the source; nvcc may merge neighbours.
#include <cstdio>
#include <set>
#include <tuple>

#include "runtime.h"

namespace cuda_emulation {
namespace {

struct Totals {
  uint64_t requests = 0, transactions = 0, least = 0, bytes = 0;
  bool shared = false, write = false, atomic = false;
};

struct Request {
  uint64_t addresses[kWarpSize];
  unsigned lanes = 0, size = 0;
  bool shared, write, atomic;
};

// One code address can both read global and write shared memory: an asynchronous copy.
struct Site {
  void* pc;
  int kind, part;
  bool operator<(const Site& other) const {
    return std::tie(pc, kind, part) < std::tie(other.pc, other.kind, other.part);
  }
};

struct WarpRequests {
  std::map<Site, uint32_t> seen[kWarpSize];
  std::map<std::pair<Site, uint32_t>, Request> open;
};

std::map<Site, Totals> totals;
std::unordered_map<const Warp*, WarpRequests> warps;
std::string report;
std::vector<std::string> names{"-"};  // of buffers and their parts; the first of shared memory
size_t size_with_parts = 0;
std::vector<size_t> part_begins;
std::map<std::pair<int, size_t>, int> part_numbers;

// The hardware serves 32 lanes at a time, 16 of 8 bytes, or 8 of 16 bytes, and one word a bank.
void add_shared(Totals& to, const Request& request) {
  const int lanes_at_once = request.size <= 4 ? 32 : request.size <= 8 ? 16 : 8;
  for (int first = 0; first < kWarpSize; first += lanes_at_once) {
    std::multiset<uint64_t> words;
    for (int l = first; l < first + lanes_at_once; ++l) {
      if (!(request.lanes >> l & 1)) continue;
      for (unsigned byte = 0; byte < std::max(4u, request.size); byte += 4) {
        const uint64_t word = (request.addresses[l] + byte) / 4;
        if (request.atomic || words.count(word) == 0) words.insert(word);
      }
    }
    if (words.empty()) continue;
    int banks[32] = {}, most = 0;
    for (const uint64_t word : words) most = std::max(most, ++banks[word % 32]);
    to.transactions += uint64_t(most);
    ++to.least;
  }
}

void add_global(Totals& to, const Request& request) {
  std::set<uint64_t> sectors;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(request.lanes >> l & 1)) continue;
    for (unsigned byte = 0; byte < request.size; byte += 4) sectors.insert((request.addresses[l] + byte) / 32);
  }
  to.transactions += sectors.size();
  to.least += (uint64_t(__builtin_popcount(request.lanes)) * request.size + 31) / 32;
}

void close(const Site& site, const Request& request) {
  Totals& to = totals[site];
  to.shared = request.shared;
  to.write = request.write;
  to.atomic = request.atomic;
  ++to.requests;
  to.bytes += uint64_t(__builtin_popcount(request.lanes)) * request.size;
  request.shared ? add_shared(to, request) : add_global(to, request);
}

}  // namespace

namespace counters {

int number_of(const std::string& name) {
  const auto known = std::find(names.begin(), names.end(), name);
  if (known == names.end()) {
    names.push_back(name);
    return int(names.size()) - 1;
  }
  return int(known - names.begin());
}

void set_parts(size_t size, std::vector<size_t> begins) {
  size_with_parts = size;
  part_begins = std::move(begins);
  part_numbers.clear();
}

int part(int name, size_t offset, size_t size) {
  if (size != size_with_parts || part_begins.empty()) return name;
  const size_t number = size_t(std::upper_bound(part_begins.begin(), part_begins.end(), offset) - part_begins.begin());
  int& known = part_numbers[{name, number}];
  if (known == 0) known = number_of(names[size_t(name)] + ", part " + std::to_string(number));
  return known;
}

void record(Fiber& fiber, void* pc, const void* address, unsigned size, bool shared, bool write, bool atomic,
            int part) {
  const Warp* warp = &fiber.owner->warps[fiber.warp];
  WarpRequests& requests = warps[warp];
  const Site site{pc, (shared ? 2 : 0) + (write ? 1 : 0), part};
  const std::pair<Site, uint32_t> key{site, requests.seen[fiber.lane][site]++};
  Request& request = requests.open[key];
  request.addresses[fiber.lane] = reinterpret_cast<uint64_t>(address);
  request.lanes |= 1u << fiber.lane;
  request.size = size;
  request.shared = shared;
  request.write = write;
  request.atomic = atomic;
  if (request.lanes != warp->lanes) return;
  close(site, request);
  requests.open.erase(key);
}

void block_ends(Block& block) {
  for (const Warp& warp : block.warps) {
    const auto requests = warps.find(&warp);
    if (requests == warps.end()) continue;
    for (const auto& [key, request] : requests->second.open) close(key.first, request);
    warps.erase(requests);
  }
}

}  // namespace counters

// One line a source line, kind and buffer: space, operation, source, requests, transactions, least, bytes, buffer.
// Forgets the counts.
const std::string& take_profile() {
  std::map<std::pair<std::string, int>, Totals> lines;
  for (const auto& [site, one] : totals) {
    const char* operation = one.atomic ? "atomic" : one.write ? "store" : "load";
    Totals& line =
        lines[{std::string(one.shared ? "shared " : "global ") + operation + " " + source_line(site.pc), site.part}];
    line.requests += one.requests;
    line.transactions += one.transactions;
    line.least += one.least;
    line.bytes += one.bytes;
  }
  totals.clear();
  report.clear();
  for (const auto& [name, line] : lines) {
    char numbers[128];
    snprintf(numbers, sizeof numbers, " %llu %llu %llu %llu ", (unsigned long long)line.requests,
             (unsigned long long)line.transactions, (unsigned long long)line.least, (unsigned long long)line.bytes);
    report += name.first + numbers + names[size_t(name.second)] + "\n";
  }
  return report;
}

}  // namespace cuda_emulation
