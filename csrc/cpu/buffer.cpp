#include "cpu/buffer.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define FLOWTT_HAS_MMAP 1
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>
#include <unordered_map>

namespace flowtt::cpu {
namespace {

constexpr size_t kLarge = size_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

void* from_malloc(size_t bytes, size_t alignment) {
  void* memory = std::aligned_alloc(alignment, rounded_up(bytes, alignment));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Large blocks of the system: malloc would keep those of up to 32 MB for itself when they are freed. `bytes` is a
// multiple of kHugePage.
#if FLOWTT_HAS_MMAP
void* from_system(size_t bytes) {
  void* const taken = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (taken == MAP_FAILED) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(taken);
  const size_t before = rounded_up(address, kHugePage) - address;
  char* const memory = static_cast<char*>(taken) + before;
  if (before > 0) munmap(taken, before);
  munmap(memory + bytes, kHugePage - before);
#ifdef MADV_HUGEPAGE
  // To get 4 KB at a time takes longer than to fill them, and rows are read and written in random order.
  madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint
#endif
  return memory;
}

void to_system(void* memory, size_t bytes) { munmap(memory, bytes); }
#else
void* from_system(size_t bytes) { return from_malloc(bytes, kHugePage); }

void to_system(void* memory, size_t) { std::free(memory); }
#endif

// Large blocks, kept for later calls while these may want them. What is kept is at most twice what was in use at once
// in the last calls, and a block that none of these has taken goes back to the system.
class LargeBlocks {
 public:
  void* take(size_t bytes) {
    bytes = rounded_up(bytes, kHugePage);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // The smallest that is large enough, the warmest of those; much larger ones are for others. Batches differ in
      // size from step to step, so blocks of one exact size would not be found again.
      auto best = kept_.rend();
      for (auto block = kept_.rbegin(); block != kept_.rend(); ++block) {
        const bool fits = bytes <= block->bytes && block->bytes <= 2 * bytes;
        if (fits && (best == kept_.rend() || block->bytes < best->bytes)) best = block;
      }
      if (best != kept_.rend()) {
        const Block block = *best;
        kept_.erase(std::next(best).base());
        kept_bytes_ -= block.bytes;
        add_to_use(block.memory, block.bytes);
        return block.memory;
      }
    }
    void* memory = from_system(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    add_to_use(memory, bytes);
    return memory;
  }

  // Keeps the block, unless `most_kept` of about its size are here that were put with such a limit too.
  void put(void* memory, int64_t most_kept) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto in_use = in_use_.find(memory);
    const size_t bytes = in_use->second;
    in_use_.erase(in_use);
    bytes_in_use_ -= bytes;
    const bool limited = most_kept < kNoLimit;
    const auto alike = [=](const Block& b) { return b.limited && b.bytes <= 2 * bytes && bytes <= 2 * b.bytes; };
    if (limited && std::count_if(kept_.begin(), kept_.end(), alike) >= most_kept) {
      to_system(memory, bytes);
      return;
    }
    kept_.push_back({memory, bytes, clock_, limited});
    kept_bytes_ += bytes;
    while (kept_bytes_ > 2 * std::max(peak_, last_peak_)) give_back_coldest();
  }

  void begin_call() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++clock_ % kPatience == 0) {
      last_peak_ = peak_;
      peak_ = bytes_in_use_;
    }
    while (!kept_.empty() && clock_ - kept_.front().clock > kPatience) give_back_coldest();
  }

  void give_back_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!kept_.empty()) give_back_coldest();
    last_peak_ = peak_ = bytes_in_use_;
  }

  size_t kept_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kept_bytes_;
  }

 private:
  static constexpr int64_t kPatience = 256;  // calls of ops; a training step makes three

  struct Block {
    void* memory;
    size_t bytes;
    int64_t clock;  // when it was put back
    bool limited;
  };

  void add_to_use(void* memory, size_t bytes) {
    in_use_[memory] = bytes;
    bytes_in_use_ += bytes;
    peak_ = std::max(peak_, bytes_in_use_);
  }

  void give_back_coldest() {
    const Block block = kept_.front();
    kept_.erase(kept_.begin());
    kept_bytes_ -= block.bytes;
    to_system(block.memory, block.bytes);
  }

  std::mutex mutex_;
  std::vector<Block> kept_;  // by clock
  size_t kept_bytes_ = 0;
  std::unordered_map<void*, size_t> in_use_;
  size_t bytes_in_use_ = 0;
  size_t peak_ = 0,
         last_peak_ = 0;  // most bytes in use at once, since the clock was a multiple of kPatience and before
  int64_t clock_ = 0;     // calls so far
};

// Never destroyed: threads may outlive main.
LargeBlocks& large_blocks() {
  static auto* blocks = new LargeBlocks;
  return *blocks;
}

}  // namespace

void* allocate(size_t bytes) { return bytes < kLarge ? from_malloc(bytes, kAlignment) : large_blocks().take(bytes); }

void release(void* memory, size_t bytes, int64_t most_kept) {
  if (memory == nullptr || bytes < kLarge) {
    std::free(memory);
  } else {
    large_blocks().put(memory, most_kept);
  }
}

void begin_call() { large_blocks().begin_call(); }

void release_kept() {
  large_blocks().give_back_all();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

int64_t kept_bytes() { return static_cast<int64_t>(large_blocks().kept_bytes()); }

}  // namespace flowtt::cpu
