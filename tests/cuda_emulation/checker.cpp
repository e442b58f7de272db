// The checks of the checked build. Kernels are compiled with -fsanitize=thread but not linked with its library: the
// hooks that the compiler calls at every memory access are here.
//
// Two accesses are ordered if a launch or a block barrier lies between them (epochs), or warp barriers (clocks of
// lanes), or, across blocks, a fence and an atomic or volatile access on each side. A fence publishes what the fencing
// thread has itself done or seen: whatever its block did in the current epoch without a barrier behind it is not
// published.
#include <link.h>

#include <memory>

#include "runtime.h"

namespace cuda_emulation {
namespace {

enum Flags : uint8_t {
  kValid = 1,
  kAtomic = 2,
  kManyLanes = 4,   // readers merged: several lanes of a warp,
  kManyWarps = 8,   // several warps of a block,
  kManyBlocks = 16  // several blocks
};

struct Access {
  uint32_t launch, block, epoch, clock;
  uint16_t thread;
  uint8_t bytes, flags;
  void* pc;
};

// What is known of four bytes. Reads of halves are kept apart: other threads may write the other half.
struct Cell {
  Access write, read, half_reads[2];
  uint8_t initialised;
};

struct Buffer {
  const char* data;
  size_t size;
  std::string name;
  int number;  // of the name, for the profile
  std::unique_ptr<Cell[]> cells;
};

std::vector<Buffer> buffers;
size_t last_buffer = 0;
std::vector<Cell> shared_cells;
std::vector<uint8_t> shared_valid;
std::unordered_map<const void*, Knowledge> published;  // by address of the atomic
bool fenced = false;                                   // some thread of this launch has fenced
int until_preemption = 0;
std::vector<std::pair<const char*, const char*>> images;  // of loaded programs: constants, the emulator's variables

int add_image(dl_phdr_info* info, size_t, void*) {
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    if (info->dlpi_phdr[k].p_type != PT_LOAD) continue;
    const char* begin = reinterpret_cast<const char*>(info->dlpi_addr + info->dlpi_phdr[k].p_vaddr);
    images.push_back({begin, begin + info->dlpi_phdr[k].p_memsz});
  }
  return 0;
}

bool knows(const Knowledge& knowledge, const Access& past) {
  const auto block = knowledge.find(past.block);
  if (block == knowledge.end()) return false;
  if (past.epoch < block->second.epoch) return true;
  if (past.epoch > block->second.epoch || (past.flags & (kManyLanes | kManyWarps))) return false;
  const auto warp = block->second.clocks.find(past.thread / kWarpSize);
  return warp != block->second.clocks.end() && warp->second[past.thread % kWarpSize] >= past.clock;
}

// Whether `past` happened before what the thread does now.
bool ordered(const Access& past, const Fiber& fiber) {
  const Block& block = *fiber.owner;
  if (!(past.flags & kValid) || past.launch != launch_in_progress->number) return true;
  if (past.flags & kManyBlocks) return false;
  if (past.block != block.number) return knows(block.acquired, past) || knows(*fiber.acquired, past);
  if (past.epoch < block.epoch) return true;
  if (past.flags & kManyWarps) return false;
  const int past_warp = past.thread / kWarpSize;
  if (past_warp != fiber.warp) return false;
  const Warp& warp = block.warps[fiber.warp];
  if (past.flags & kManyLanes) {
    for (int l = 0; l < kWarpSize; ++l) {
      if ((warp.lanes >> l & 1) && l != fiber.lane && warp.clocks[fiber.lane][l] < past.clock) return false;
    }
    return true;
  }
  return past.thread == fiber.number || warp.clocks[fiber.lane][past.thread % kWarpSize] >= past.clock;
}

void fail_race(const char* kind, const Access& past, void* pc, const std::string& name, size_t offset) {
  const std::string before = source_line(past.pc), now = source_line(pc);
  const bool many = past.flags & (kManyLanes | kManyWarps | kManyBlocks);
  fail("RACE %s on %s + %zu bytes: %s, and earlier %s by block %u thread %u%s", kind, name.c_str(), offset, now.c_str(),
       before.c_str(), past.block, past.thread, many ? " and others" : "");
}

void check_cell(Fiber& fiber, Cell& cell, unsigned bytes, bool write, bool atomic, void* pc, const std::string& name,
                size_t offset) {
  const Block& block = *fiber.owner;
  if ((!write || atomic) && (cell.initialised & bytes) != bytes) {
    fail("UNINITIALISED read of %s + %zu bytes at %s", name.c_str(), offset, source_line(pc).c_str());
  }
  const auto conflicts = [&](const Access& past) {
    return (past.bytes & bytes) && !(atomic && (past.flags & kAtomic)) && !ordered(past, fiber);
  };
  if (conflicts(cell.write)) fail_race(write ? "write after write" : "read after write", cell.write, pc, name, offset);
  Access now{launch_in_progress->number,
             block.number,
             block.epoch,
             block.warps[fiber.warp].clocks[fiber.lane][fiber.lane],
             uint16_t(fiber.number),
             uint8_t(bytes),
             uint8_t(kValid | (atomic ? kAtomic : 0)),
             pc};
  if (write) {
    for (const Access* const past : {&cell.read, &cell.half_reads[0], &cell.half_reads[1]}) {
      if (conflicts(*past)) fail_race("write after read", *past, pc, name, offset);
    }
    cell.write = now;
    cell.initialised |= bytes;
    return;
  }
  Access& past = bytes == 15 ? cell.read : cell.half_reads[bytes > 3];
  if (!ordered(past, fiber)) {  // both readers count: later writers must come after both
    now.flags |= past.flags & (kManyLanes | kManyWarps | kManyBlocks);
    if (!(past.flags & kAtomic)) now.flags &= uint8_t(~kAtomic);
    now.flags |= past.block != block.number              ? kManyBlocks
                 : past.thread / kWarpSize != fiber.warp ? kManyWarps
                                                         : kManyLanes;
    now.bytes |= past.bytes;
    now.clock = std::max(now.clock, past.clock);
  }
  past = now;
}

// Calls visit(first byte, bit mask) for each four-byte word that the access touches.
template <class Visit>
void for_each_word(size_t offset, unsigned size, const Visit& visit) {
  for (size_t at = offset, end = offset + size; at < end;) {
    const size_t word = at & ~size_t(3);
    unsigned bytes = 0;
    for (; at < end && (at & ~size_t(3)) == word; ++at) bytes |= 1u << (at & 3);
    visit(word, bytes);
  }
}

Buffer* find_buffer(const char* address) {
  const auto holds = [address](const Buffer& buffer) { return size_t(address - buffer.data) < buffer.size; };
  if (last_buffer < buffers.size() && holds(buffers[last_buffer])) return &buffers[last_buffer];
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (holds(buffers[i])) return &buffers[last_buffer = i];
  }
  return nullptr;
}

void check_shared(Fiber& fiber, size_t offset, unsigned size, bool write, bool atomic, void* pc) {
  static const std::string kName = "shared memory";
  if (offset / kArenaBytes != size_t(fiber.owner->slot)) {
    fail("OUT OF BOUNDS: shared memory of another block at %s", source_line(pc).c_str());
  }
  for (size_t i = offset; i < offset + size; ++i) {
    if (shared_valid[i]) continue;
    fail("OUT OF BOUNDS: shared memory + %zu bytes, %s of %u, at %s", i % kArenaBytes, write ? "write" : "read", size,
         source_line(pc).c_str());
  }
  for_each_word(offset, size, [&](size_t word, unsigned bytes) {
    check_cell(fiber, shared_cells[word / 4], bytes, write, atomic, pc, kName, word % kArenaBytes);
  });
}

// Returns what the profile calls the place.
int check_global(Fiber& fiber, const char* address, unsigned size, bool write, bool atomic, void* pc) {
  Buffer* buffer = find_buffer(address);
  if (buffer == nullptr) {
    fail("OUT OF BOUNDS: %s of %u bytes at %p, in no buffer, at %s", write ? "write" : "read", size, address,
         source_line(pc).c_str());
  }
  const size_t offset = size_t(address - buffer->data);
  if (offset + size > buffer->size) {
    fail("OUT OF BOUNDS: %s of %u bytes at %s + %zu, which has %zu, at %s", write ? "write" : "read", size,
         buffer->name.c_str(), offset, buffer->size, source_line(pc).c_str());
  }
  for_each_word(offset, size, [&](size_t word, unsigned bytes) {
    check_cell(fiber, buffer->cells[word / 4], bytes, write, atomic, pc, buffer->name, word);
  });
  return config().profile ? counters::part(buffer->number, offset, buffer->size) : 0;
}

}  // namespace

void register_buffer(const void* data, size_t bytes, const char* name, bool initialised) {
  unregister_buffer(data);
  if (bytes == 0) return;
  Buffer buffer{static_cast<const char*>(data), bytes, name, counters::number_of(name),
                std::make_unique<Cell[]>(bytes / 4 + 1)};
  for (size_t i = 0; initialised && i <= bytes / 4; ++i) buffer.cells[i].initialised = 15;
  buffers.push_back(std::move(buffer));
}

void unregister_buffer(const void* data) {
  const auto same = [data](const Buffer& buffer) { return buffer.data == data; };
  buffers.erase(std::remove_if(buffers.begin(), buffers.end(), same), buffers.end());
}

void host_wrote(const void* data, size_t bytes) {
  const auto* const byte = static_cast<const char*>(data);
  Buffer* buffer = find_buffer(byte);
  if (buffer == nullptr || bytes == 0) return;
  if (size_t(byte - buffer->data) + bytes > buffer->size) {
    throw Error("OUT OF BOUNDS: a copy or memset of " + std::to_string(bytes) + " bytes goes past " + buffer->name);
  }
  for (size_t at = size_t(byte - buffer->data), end = at + bytes; at < end; ++at) {
    buffer->cells[at / 4].initialised |= uint8_t(1u << (at & 3));
  }
}

void merge(Knowledge& into, const Knowledge& from) {
  for (const auto& [block, seen] : from) {
    Seen& known = into[block];
    if (seen.epoch > known.epoch) {
      known = seen;
    } else if (seen.epoch == known.epoch) {
      for (const auto& [warp, clocks] : seen.clocks) {
        auto& own = known.clocks[warp];
        for (int l = 0; l < kWarpSize; ++l) own[l] = std::max(own[l], clocks[l]);
      }
    }
  }
}

namespace checker {

void launch_starts() {
  images.clear();
  dl_iterate_phdr(add_image, nullptr);
  published.clear();
  fenced = false;
  if (shared_cells.empty()) {
    shared_cells.resize(kArenaBytes * kMaxResident / 4);
    shared_valid.resize(kArenaBytes * kMaxResident);
  }
}

void shared_is(unsigned char* data, size_t bytes, bool valid) {
  const size_t offset = size_t(data - arenas);
  std::memset(&shared_valid[offset], valid, bytes);
  std::memset(static_cast<void*>(&shared_cells[offset / 4]), 0, (bytes + 3) / 4 * sizeof(Cell));
}

void block_starts(Block& block, size_t shared_bytes) {
  shared_is(block.arena, kArenaBytes, false);
  shared_is(block.arena, shared_bytes, true);
}

void block_ends(Block& block) { counters::block_ends(block); }

void forget_shared(const void* data, size_t bytes) {
  for_each_word(size_t(static_cast<const unsigned char*>(data) - arenas), unsigned(bytes),
                [](size_t word, unsigned mask) { shared_cells[word / 4].initialised &= uint8_t(~mask); });
}

void access(const void* address, unsigned size, bool write, bool atomic, void* pc, bool counted) {
  Fiber& fiber = *self();
  const auto* const byte = static_cast<const char*>(address);
  if (byte >= stacks && byte < stacks + stacks_bytes) return;  // the thread's own variables
  const size_t offset = size_t(reinterpret_cast<const unsigned char*>(byte) - arenas);
  const bool shared = offset < kArenaBytes * kMaxResident;
  int part = 0;
  if (shared) {
    check_shared(fiber, offset, size, write, atomic, pc);
  } else {
    if (find_buffer(byte) == nullptr) {
      const auto* const arguments = static_cast<const char*>(launch_in_progress->arguments);
      if (size_t(byte - arguments) < launch_in_progress->arguments_size) return;
      for (const auto& [begin, end] : images) {
        if (byte >= begin && byte < end) return;
      }
    }
    part = check_global(fiber, byte, size, write, atomic, pc);
  }
  if (counted && config().profile) counters::record(fiber, pc, address, size, shared, write, atomic, part);
  const int period = config().accesses_per_preemption;
  if (!atomic && period > 0 && --until_preemption <= 0) {
    until_preemption = 1 + int(random_below(uint32_t(2 * period)));
    yield();
  }
}

void publish_and_observe(Fiber& fiber, const void* address) {
  if (!fenced) return;
  if (!fiber.released->empty()) merge(published[address], *fiber.released);
  const auto value = published.find(address);
  if (value != published.end()) merge(*fiber.observed, value->second);
}

void fence(Fiber& fiber) {
  fenced = true;
  Block& block = *fiber.owner;
  merge(*fiber.acquired, *fiber.observed);
  if (!fiber.observed->empty()) block.acquiring = true;
  fiber.observed->clear();
  merge(*fiber.released, block.acquired);
  merge(*fiber.released, *fiber.acquired);
  auto& clocks = block.warps[fiber.warp].clocks[fiber.lane];
  Seen own{block.epoch, {}};
  std::copy(clocks, clocks + kWarpSize, own.clocks[fiber.warp].begin());
  merge(*fiber.released, {{block.number, own}});
  ++clocks[fiber.lane];  // what the thread does from now on is not published yet
}

void barrier_completes(Block& block) {
  if (!block.acquiring) return;
  for (int i = 0; i < block.threads; ++i) {
    merge(block.acquired, *block.fibers[i]->acquired);
    block.fibers[i]->acquired->clear();
  }
  block.acquiring = false;
}

void warp_syncs(Block& block, Warp& warp, unsigned mask, Fiber** lanes) {
  uint32_t joined[kWarpSize] = {};
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    for (int k = 0; k < kWarpSize; ++k) joined[k] = std::max(joined[k], warp.clocks[l][k]);
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    std::copy(joined, joined + kWarpSize, warp.clocks[l]);
    ++warp.clocks[l][l];
  }
  if (!block.acquiring) return;
  Knowledge all;
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) merge(all, *lanes[l]->acquired);
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) *lanes[l]->acquired = all;
  }
}

}  // namespace checker

namespace {

void hook(void* address, unsigned size, bool write, bool is_volatile, void* pc) {
  if (!in_kernel) return;
  if (is_volatile) checker::publish_and_observe(*self(), address);
  checker::access(address, size, write, is_volatile, pc);
}

void aligned_hook(void* address, unsigned size, bool write, bool is_volatile, void* pc) {
  if (in_kernel && reinterpret_cast<uintptr_t>(address) % size != 0) {
    fail("MISALIGNED %s of %u bytes at %p, %s", write ? "write" : "read", size, address, source_line(pc).c_str());
  }
  hook(address, size, write, is_volatile, pc);
}

void range_hook(const void* address, size_t size, bool write, void* pc) {
  if (in_kernel && size > 0) checker::access(address, unsigned(size), write, false, pc);
}

}  // namespace
}  // namespace cuda_emulation

#define PC __builtin_return_address(0)
#define HOOKS(n)                                                                                 \
  void __tsan_read##n(void* a) { cuda_emulation::aligned_hook(a, n, false, false, PC); }         \
  void __tsan_write##n(void* a) { cuda_emulation::aligned_hook(a, n, true, false, PC); }         \
  void __tsan_unaligned_read##n(void* a) { cuda_emulation::hook(a, n, false, false, PC); }       \
  void __tsan_unaligned_write##n(void* a) { cuda_emulation::hook(a, n, true, false, PC); }       \
  void __tsan_volatile_read##n(void* a) { cuda_emulation::aligned_hook(a, n, false, true, PC); } \
  void __tsan_volatile_write##n(void* a) { cuda_emulation::aligned_hook(a, n, true, true, PC); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
// The host's atomics, in the sources of kernels.
uint32_t __tsan_atomic32_load(const volatile uint32_t* a, int) { return __atomic_load_n(a, __ATOMIC_SEQ_CST); }
void __tsan_atomic32_store(volatile uint32_t* a, uint32_t value, int) { __atomic_store_n(a, value, __ATOMIC_SEQ_CST); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* a, size_t n) { cuda_emulation::range_hook(a, n, false, PC); }
void __tsan_write_range(void* a, size_t n) { cuda_emulation::range_hook(a, n, true, PC); }
void* __tsan_memcpy(void* target, const void* source, size_t n) {
  cuda_emulation::range_hook(source, n, false, PC);
  cuda_emulation::range_hook(target, n, true, PC);
  return std::memcpy(target, source, n);
}
void* __tsan_memset(void* target, int value, size_t n) {
  cuda_emulation::range_hook(target, n, true, PC);
  return std::memset(target, value, n);
}
}
