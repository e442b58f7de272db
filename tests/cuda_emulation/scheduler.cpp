// Launches: blocks, fibers, the order in which they run.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <numeric>

#include "runtime.h"

namespace cuda_emulation {

Thread* current = nullptr;
Launch* launch_in_progress = nullptr;
unsigned char* arenas = nullptr;
char* stacks = nullptr;
size_t stacks_bytes = 0;
bool in_kernel = false;

namespace {

enum class Order { kRandom, kFirstIn, kLastIn };

Config settings;
uint64_t random_state = 0x9E3779B97F4A7C15ull;
std::deque<Fiber*> ready;
Order order = Order::kRandom;
std::vector<Block> blocks;
void* scheduler_stack_pointer = nullptr;
uint32_t launches = 0;
uint64_t steps = 0;
std::string error;
// Owned here, since an aborted launch abandons its fibers' stacks.
std::deque<std::vector<AsyncCopy>> all_copies;
std::deque<std::vector<unsigned>> all_copy_groups;
std::deque<Knowledge> all_knowledge;

uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1Dull;
}

// Saves the callee's registers and stack pointer in *save and goes on where `to` was saved. A jump, not a return: the
// processor's return prediction would be wrong every time.
#if defined(__x86_64__)
__attribute__((naked, noinline)) void switch_context(void** /*save*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n popq %rcx\n jmpq *%rcx\n");
}
constexpr int kSavedRegisters = 6;
#else
#error "the CUDA emulator has a context switch for x86-64 only"
#endif

std::string describe_waiting() {
  static const char* const kStates[] = {"ready", "at __syncthreads", "in a warp operation", "has exited"};
  std::map<std::string, int> waiting;
  for (const Block& block : blocks) {
    for (int i = 0; i < block.threads && block.alive > 0; ++i) {
      const Fiber& fiber = *block.fibers[i];
      char text[512];
      snprintf(text, sizeof text, "  block %u warp %d: %s, last seen at %s:%d", block.number, fiber.warp,
               kStates[int(fiber.state)], fiber.file, fiber.line);
      ++waiting[text];
    }
  }
  std::string text;
  int lines = 0;
  for (const auto& [what, count] : waiting) {
    if (++lines > 40) return text + "  ...\n";
    text += what + " (" + std::to_string(count) + " threads)\n";
  }
  return text;
}

[[noreturn]] void abandon(const std::string& what) {
  launch_in_progress = nullptr;
  throw Error(what + "\n" + describe_waiting());
}

void fiber_main() {
  Fiber* fiber = self();
  launch_in_progress->body(launch_in_progress->arguments);
  Block& block = *fiber->owner;
  if (!fiber->copies->empty()) fail("thread exited with %zu async copies never waited for", fiber->copies->size());
  if (block.waiting > 0) {
    fail("thread exited while %d threads wait at __syncthreads %s:%d", block.waiting, block.barrier_file,
         block.barrier_line);
  }
  for (const WarpMeeting& meeting : block.warps[fiber->warp].meetings) {
    if (meeting.mask >> fiber->lane & 1) {
      fail("lane exited while lanes %08x wait for it in a warp operation with mask %08x", meeting.arrived,
           meeting.mask);
    }
  }
  --block.alive;
  fiber->state = State::kDone;
  steps = 0;
  leave();
  abort();
}

void start_fiber(Block& block, int number) {
  const dim3 size = launch_in_progress->block;
  const size_t slot = size_t(block.slot) * kMaxThreads + number;
  char* const stack = stacks + slot * kStackBytes;
  // At the top of its stack, staggered so that stacks do not fall into the same cache sets.
  auto* fiber = reinterpret_cast<Fiber*>(stack + kStackBytes - 1024 - 64 * (slot % 61));
  if (block.fibers[number] == nullptr) {
    block.fibers[number] = fiber;
    fiber->copies = &all_copies.emplace_back();
    fiber->copy_groups = &all_copy_groups.emplace_back();
    for (Knowledge** knowledge : {&fiber->acquired, &fiber->observed, &fiber->released}) {
      *knowledge = &all_knowledge.emplace_back();
    }
  }
  fiber->copies->clear();
  fiber->copy_groups->clear();
  for (Knowledge* knowledge : {fiber->acquired, fiber->observed, fiber->released}) knowledge->clear();
  fiber->thread = make_uint3(number % size.x, number / size.x % size.y, number / (size.x * size.y));
  fiber->block = block.index;
  fiber->block_size = size;
  fiber->grid_size = launch_in_progress->grid;
  fiber->owner = &block;
  fiber->number = number;
  fiber->lane = number % kWarpSize;
  fiber->warp = number / kWarpSize;
  fiber->file = launch_in_progress->file;
  fiber->line = launch_in_progress->line;
  // As after a call: the stack pointer is 8 below a multiple of 16.
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber) & ~uintptr_t(63)) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
  make_ready(fiber);
}

void start_block(Block& block, uint32_t number) {
  const Launch& launch = *launch_in_progress;
  block.number = number;
  block.index = make_uint3(number % launch.grid.x, number / launch.grid.x % launch.grid.y,
                           number / (launch.grid.x * launch.grid.y));
  block.threads = block.alive = int(launch.block.x * launch.block.y * launch.block.z);
  block.waiting = block.votes = 0;
  block.epoch = 0;
  block.acquired.clear();
  block.acquiring = false;
  block.arena = arenas + size_t(block.slot) * kArenaBytes;
  block.warps.resize((block.threads + kWarpSize - 1) / kWarpSize);
  for (size_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    const int lanes = std::min(kWarpSize, block.threads - int(w) * kWarpSize);
    warp.meetings.clear();
    warp.lanes = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    std::memset(warp.clocks, 0, sizeof warp.clocks);
    for (int l = 0; l < kWarpSize; ++l) warp.clocks[l][l] = 1;
  }
  checker::block_starts(block, launch.shared_bytes);
  poison(block.arena, launch.shared_bytes);
  if (block.fibers.size() < size_t(block.threads)) block.fibers.resize(block.threads);
  for (int i = 0; i < block.threads; ++i) start_fiber(block, i);
}

void* reserve(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw Error("no address space for the emulator's stacks");
  return data;
}

Fiber* next_fiber() {
  Fiber* fiber = ready.back();
  if (order == Order::kFirstIn) {
    fiber = ready.front();
    ready.pop_front();
    return fiber;
  }
  if (order == Order::kRandom) {
    std::swap(ready[random_below(uint32_t(ready.size()))], ready.back());
    fiber = ready.back();
  }
  ready.pop_back();
  return fiber;
}

std::vector<uint32_t> block_order(uint32_t count) {
  std::vector<uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (order == Order::kLastIn) std::reverse(numbers.begin(), numbers.end());
  if (order == Order::kRandom) {
    for (uint32_t i = count; i > 1; --i) std::swap(numbers[i - 1], numbers[random_below(i)]);
  }
  return numbers;
}

}  // namespace

Config& config() { return settings; }

void seed(uint64_t value) {
  settings.seed = value;
  random_state = value * 0x9E3779B97F4A7C15ull + 1;
}

uint32_t random_below(uint32_t n) { return uint32_t((random_bits() >> 32) * n >> 32); }

void make_ready(Fiber* fiber) {
  fiber->state = State::kReady;
  ready.push_back(fiber);
}

void leave() { switch_context(&self()->stack_pointer, scheduler_stack_pointer); }

void yield() {
  if (!in_kernel) return;
  Fiber* fiber = self();
  fiber->state = State::kReady;
  order == Order::kLastIn ? ready.push_front(fiber) : ready.push_back(fiber);
  leave();
}

void poison(void* data, size_t bytes) { std::memset(data, 0xff, bytes); }

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  error = text;
  Fiber* fiber = self();
  if (fiber == nullptr) throw Error(error);
  char place[256];
  snprintf(place, sizeof place, "\n  in block (%u,%u,%u) thread (%u,%u,%u), launched at %s:%d", fiber->block.x,
           fiber->block.y, fiber->block.z, fiber->thread.x, fiber->thread.y, fiber->thread.z, launch_in_progress->file,
           launch_in_progress->line);
  error += place;
  fiber->state = State::kDone;
  leave();
  abort();
}

int lane() { return self()->lane; }

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* arguments, size_t arguments_size,
         const char* file, int line) {
  const uint64_t num_blocks = uint64_t(grid.x) * grid.y * grid.z;
  const uint64_t num_threads = uint64_t(block.x) * block.y * block.z;
  if (in_kernel) throw Error("a kernel cannot launch another one here");
  if (num_blocks == 0 || num_blocks >> 31 || num_threads == 0 || num_threads > kMaxThreads ||
      shared_bytes > size_t(settings.shared_bytes)) {
    throw Error(std::string("invalid launch at ") + file + ":" + std::to_string(line) + ": " +
                std::to_string(num_blocks) + " blocks of " + std::to_string(num_threads) + " threads with " +
                std::to_string(shared_bytes) + " bytes of shared memory");
  }
  if (stacks == nullptr) {
    stacks_bytes = size_t(kMaxResident) * kMaxThreads * kStackBytes;
    stacks = static_cast<char*>(reserve(stacks_bytes));
    arenas = static_cast<unsigned char*>(reserve(kArenaBytes * kMaxResident));
    blocks.resize(kMaxResident);
    for (int i = 0; i < kMaxResident; ++i) blocks[i].slot = i;
  }
  Launch launch{body, arguments, arguments_size, grid, block, shared_bytes, file, line, ++launches};
  launch_in_progress = &launch;
  checker::launch_starts();
  error.clear();
  ready.clear();
  steps = 0;
  const int resident =
      settings.resident_blocks > 0 ? std::min(settings.resident_blocks, kMaxResident) : 1 + int(random_below(4));
  order = Order(random_below(3));
  const std::vector<uint32_t> numbers = block_order(uint32_t(num_blocks));
  for (Block& unused : blocks) unused.alive = unused.threads = 0;
  size_t next = 0;
  int alive = 0;
  for (; alive < resident && next < numbers.size(); ++alive) start_block(blocks[alive], numbers[next++]);
  while (alive > 0) {
    if (ready.empty())
      abandon(std::string("DEADLOCK: no thread can run, launched at ") + file + ":" + std::to_string(line));
    if (++steps > settings.max_steps) {
      abandon("LIVELOCK: " + std::to_string(steps) + " switches without a thread finishing");
    }
    Fiber* fiber = next_fiber();
    current = fiber;
    in_kernel = true;
    switch_context(&scheduler_stack_pointer, fiber->stack_pointer);
    in_kernel = false;
    current = nullptr;
    if (!error.empty()) abandon(error);
    Block& own = *fiber->owner;
    if (fiber->state != State::kDone || own.alive > 0) continue;
    checker::block_ends(own);
    if (next < numbers.size()) {
      start_block(own, numbers[next++]);
    } else {
      own.threads = 0;
      --alive;
    }
  }
  launch_in_progress = nullptr;
}

}  // namespace cuda_emulation
