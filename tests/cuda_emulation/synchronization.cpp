// Barriers, warp operations, atomics, fences, asynchronous copies and shared memory.
#include "runtime.h"

namespace cuda_emulation {
namespace {

// Preempts the thread now and then, so that others run between its steps.
void maybe_yield() {
  if (in_kernel && int(random_below(100)) < config().sync_preemption_percent) yield();
}

bool same_place(const char* file_a, int line_a, const char* file_b, int line_b) {
  return line_a == line_b && std::strcmp(file_a, file_b) == 0;
}

// What a lane gets from an operation that all lanes of the mask have reached.
void deliver(WarpOp op, Fiber* to, Fiber** lanes, unsigned mask, const char* file, int line) {
  if (op == WarpOp::kShuffle) {
    const int source = to->source_lane & (kWarpSize - 1);
    if (!(mask >> source & 1)) {
      fail("shuffle at %s:%d: lane %d reads lane %d, which is not in mask %08x", file, line, to->lane, source, mask);
    }
    std::memcpy(to->out, lanes[source]->in, to->size);
    return;
  }
  if (op == WarpOp::kGather) {
    for (int l = 0; l < kWarpSize; ++l) {
      std::memcpy(static_cast<char*>(to->gathered) + l * to->size, lanes[l]->in, to->size);
    }
    return;
  }
  unsigned result = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    const bool bit = op == WarpOp::kBallot ? lanes[l]->in[0] != 0 : std::memcmp(lanes[l]->in, to->in, 8) == 0;
    if (bit) result |= 1u << l;
  }
  std::memcpy(to->out, &result, sizeof result);
}

}  // namespace

int block_barrier(Vote vote, int predicate, const char* file, int line) {
  Fiber* fiber = self();
  Block& block = *fiber->owner;
  fiber->file = file;
  fiber->line = line;
  if (block.alive != block.threads) {
    fail("__syncthreads at %s:%d after %d threads of the block exited", file, line, block.threads - block.alive);
  }
  if (block.waiting == 0) {
    block.barrier_file = file;
    block.barrier_line = line;
    block.vote = vote;
    block.votes = vote == Vote::kAnd ? 1 : 0;
  } else if (block.vote != vote || !same_place(block.barrier_file, block.barrier_line, file, line)) {
    fail("divergent __syncthreads: %s:%d while %d threads wait at %s:%d", file, line, block.waiting, block.barrier_file,
         block.barrier_line);
  }
  if (vote == Vote::kCount) block.votes += predicate != 0;
  if (vote == Vote::kAnd) block.votes &= predicate != 0;
  if (vote == Vote::kOr) block.votes |= predicate != 0;
  if (++block.waiting < block.threads) {
    fiber->state = State::kAtBarrier;
    leave();
    return fiber->barrier_result;
  }
  block.waiting = 0;
  checker::barrier_completes(block);
  ++block.epoch;
  for (int i = 0; i < block.threads; ++i) {
    Fiber* other = block.fibers[i];
    if (other->state != State::kAtBarrier) continue;
    other->barrier_result = block.votes;
    make_ready(other);
  }
  return block.votes;
}

void warp_operation(WarpOp op, unsigned mask, const void* in, void* out, unsigned size, int source_lane,
                    const char* file, int line) {
  Fiber* fiber = self();
  Block& block = *fiber->owner;
  Warp& warp = block.warps[fiber->warp];
  fiber->file = file;
  fiber->line = line;
  fiber->op = op;
  fiber->source_lane = source_lane;
  fiber->size = size;
  fiber->gathered = out;
  if (size > 0) std::memcpy(fiber->in, in, size);
  if (!(mask >> fiber->lane & 1)) {
    fail("warp operation at %s:%d: lane %d is not in its mask %08x", file, line, fiber->lane, mask);
  }
  if (mask & ~warp.lanes) {
    fail("warp operation at %s:%d: mask %08x names lanes that do not exist; there are %08x", file, line, mask,
         warp.lanes);
  }
  Fiber** lanes = &block.fibers[fiber->warp * kWarpSize];
  auto meeting = std::find_if(warp.meetings.begin(), warp.meetings.end(),
                              [mask](const WarpMeeting& meeting) { return meeting.mask == mask; });
  if (meeting == warp.meetings.end()) {
    for (int l = 0; l < kWarpSize; ++l) {
      if ((mask >> l & 1) && lanes[l]->state == State::kDone) {
        fail("warp operation at %s:%d: mask %08x names lane %d, which has exited", file, line, mask, l);
      }
    }
    meeting = warp.meetings.insert(warp.meetings.end(), {mask, 0});
  }
  meeting->arrived |= 1u << fiber->lane;
  const unsigned out_size = op == WarpOp::kShuffle ? size : op == WarpOp::kGather ? 0 : sizeof(unsigned);
  if (meeting->arrived != mask) {
    fiber->state = State::kInWarpOp;
    leave();
    if (out != nullptr) std::memcpy(out, fiber->out, out_size);
    return;
  }
  warp.meetings.erase(meeting);
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) continue;
    Fiber* other = lanes[l];
    if (other->op != op || other->size != size || !same_place(other->file, other->line, file, line)) {
      fail("divergent warp operation: lane %d at %s:%d, lane %d at %s:%d (mask %08x)", fiber->lane, file, line, l,
           other->file, other->line, mask);
    }
    if (op != WarpOp::kSync) deliver(op, other, lanes, mask, file, line);
  }
  if (op == WarpOp::kSync) checker::warp_syncs(block, warp, mask, lanes);
  for (int l = 0; l < kWarpSize; ++l) {
    if ((mask >> l & 1) && l != fiber->lane) make_ready(lanes[l]);
  }
  if (out != nullptr) std::memcpy(out, fiber->out, out_size);
}

void atomic_begin(void* address, void* old, unsigned size, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(address) % size != 0) {
    fail("MISALIGNED atomic of %u bytes at %s:%d", size, file, line);
  }
  if (Fiber* fiber = self()) {
    fiber->file = file;
    fiber->line = line;
    checker::publish_and_observe(*fiber, address);
    checker::access(address, size, true, true, __builtin_return_address(0));
  }
  std::memcpy(old, address, size);
}

void atomic_end(void* address, const void* value, unsigned size) {
  std::memcpy(address, value, size);
  maybe_yield();
}

void device_fence() {
  checker::fence(*self());
  maybe_yield();
}

// The copy lands when it is waited for; until then the target is poison, and unreadable to the checker.
void async_copy(void* target, const void* source, unsigned size, unsigned zeros, const char* file, int line) {
  Fiber* fiber = self();
  fiber->file = file;
  fiber->line = line;
  if (size != 4 && size != 8 && size != 16)
    fail("async copy of %u bytes at %s:%d; allowed: 4, 8, 16", size, file, line);
  if (reinterpret_cast<uintptr_t>(target) % size != 0 || reinterpret_cast<uintptr_t>(source) % size != 0) {
    fail("MISALIGNED async copy of %u bytes at %s:%d", size, file, line);
  }
  if (size_t(static_cast<unsigned char*>(target) - fiber->owner->arena) >= kArenaBytes) {
    fail("async copy at %s:%d to what is not shared memory of the block", file, line);
  }
  void* const pc = __builtin_return_address(0);
  if (size > zeros) checker::access(source, size - zeros, false, false, pc);
  checker::access(target, size, true, false, pc);
  checker::forget_shared(target, size);
  poison(target, size);
  fiber->copies->push_back({target, source, size, zeros});
}

void async_commit() {
  Fiber* fiber = self();
  unsigned grouped = 0;
  for (const unsigned group : *fiber->copy_groups) grouped += group;
  fiber->copy_groups->push_back(unsigned(fiber->copies->size()) - grouped);
}

void async_wait(unsigned groups_in_flight) {
  Fiber* fiber = self();
  while (fiber->copy_groups->size() > groups_in_flight) {
    const unsigned count = fiber->copy_groups->front();
    fiber->copy_groups->erase(fiber->copy_groups->begin());
    for (unsigned i = 0; i < count; ++i) {
      const AsyncCopy& copy = (*fiber->copies)[i];
      std::memcpy(copy.target, copy.source, copy.size - copy.zeros);
      std::memset(static_cast<char*>(copy.target) + copy.size - copy.zeros, 0, copy.zeros);
      checker::access(copy.target, copy.size, true, false, __builtin_return_address(0), false);  // counted when issued
    }
    fiber->copies->erase(fiber->copies->begin(), fiber->copies->begin() + count);
  }
}

unsigned char* dynamic_shared() { return self()->owner->arena; }

// Called by every thread while it carves shared memory.
void shared_red_zone(void* begin, size_t bytes) {
  checker::shared_is(static_cast<unsigned char*>(begin), bytes, false);
}

}  // namespace cuda_emulation
