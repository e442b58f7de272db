// What the parts of the emulator share: threads, warps, blocks, and what a thread knows of others' memory accesses.
#pragma once
#include <array>
#include <map>
#include <unordered_map>
#include <vector>

#include "cuda_emulation.h"

namespace cuda_emulation {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxResident = 16;
constexpr size_t kArenaBytes = 256 * 1024;  // shared memory of a resident block, red zones included
constexpr size_t kStackBytes = 128 * 1024;

// How much of one block's past a thread has seen: all of the epochs (stretches between block barriers) before `epoch`,
// and of `epoch` itself what the lane clocks of each warp say.
struct Seen {
  uint32_t epoch = 0;
  std::map<int, std::array<uint32_t, kWarpSize>> clocks;
};
using Knowledge = std::unordered_map<uint32_t, Seen>;  // by block
void merge(Knowledge& into, const Knowledge& from);

struct AsyncCopy {
  void* target;
  const void* source;
  unsigned size, zeros;
};

enum class State : uint8_t { kReady, kAtBarrier, kInWarpOp, kDone };

struct Block;
struct Fiber : Thread {
  void* stack_pointer;
  Block* owner;
  int number, lane, warp;
  State state;
  const char* file;  // of the last synchronisation
  int line;
  int barrier_result;
  WarpOp op;
  int source_lane;
  unsigned size;
  alignas(16) unsigned char in[32], out[16];
  void* gathered;  // where a gather goes
  std::vector<AsyncCopy>* copies;
  std::vector<unsigned>* copy_groups;
  Knowledge* acquired;  // what this thread has seen of other blocks, beyond what its block has
  Knowledge* observed;  // published values it has read without a fence since
  Knowledge* released;  // what its last fence made publishable
};

struct WarpMeeting {
  unsigned mask, arrived;
};

struct Warp {
  std::vector<WarpMeeting> meetings;
  unsigned lanes;
  uint32_t clocks[kWarpSize][kWarpSize];  // [lane]: what the lane has seen of the others; [lane][lane] is its own
};

struct Block {
  int slot;
  uint32_t number;
  uint3 index;
  int threads, alive;
  int waiting, votes;
  Vote vote;
  const char* barrier_file;
  int barrier_line;
  uint32_t epoch;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  unsigned char* arena;
  Knowledge acquired;  // what every thread of the block has seen of other blocks
  bool acquiring;      // some thread has seen more than the block
};

struct Launch {
  void (*body)(void*);
  void* arguments;
  size_t arguments_size;
  dim3 grid, block;
  size_t shared_bytes;
  const char* file;
  int line;
  uint32_t number;
};

extern Launch* launch_in_progress;
extern unsigned char* arenas;
extern char* stacks;
extern size_t stacks_bytes;
extern bool in_kernel;

inline Fiber* self() { return static_cast<Fiber*>(current); }
uint32_t random_below(uint32_t n);
void make_ready(Fiber* fiber);
void leave();  // back to the scheduler, until made ready
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void poison(void* data, size_t bytes);  // NaN, or -1

// The checker; does nothing in the fast build.
namespace checker {
void launch_starts();
void block_starts(Block& block, size_t shared_bytes);
void block_ends(Block& block);
void shared_is(unsigned char* data, size_t bytes, bool valid);
void forget_shared(const void* data, size_t bytes);  // contents are undefined from now on
// counted: whether the profile counts it.
void access(const void* address, unsigned size, bool write, bool atomic, void* pc, bool counted = true);
void publish_and_observe(Fiber& fiber, const void* address);
void fence(Fiber& fiber);
void barrier_completes(Block& block);
void warp_syncs(Block& block, Warp& warp, unsigned mask, Fiber** lanes);
}  // namespace checker

// File and line of a code address, outside this emulator where the call was inlined.
std::string source_line(void* pc);

const std::string& take_profile();

// Memory transactions by source line and buffer; see counters.cpp.
namespace counters {
int number_of(const std::string& name);
// Number of the part of a buffer, given its name's, that a byte belongs to.
int part(int name, size_t offset, size_t size);
// Buffers of `size` bytes count as several, which begin at these bytes.
void set_parts(size_t size, std::vector<size_t> begins);
void record(Fiber& fiber, void* pc, const void* address, unsigned size, bool shared, bool write, bool atomic, int part);
void block_ends(Block& block);
}  // namespace counters

}  // namespace cuda_emulation
