#include "cpu/buffer.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>

namespace flowtt::cpu {
namespace {

constexpr size_t kLarge = size_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

void* from_system(size_t bytes, size_t alignment) {
  void* memory = std::aligned_alloc(alignment, rounded_up(bytes, alignment));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// To get 4 KB at a time takes longer than to fill them, and rows are read and written in random order.
void prefer_large_pages(void* memory, size_t bytes) {
#ifdef __linux__
  madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint
#else
  (void)memory, (void)bytes;
#endif
}

// Blocks come in few sizes, so that calls of nearly the same size share them: an eighth of a power of two apart.
size_t block_size(size_t bytes) {
  size_t step = kHugePage;
  while (step * 16 <= bytes) step *= 2;
  return rounded_up(bytes, step);
}

// Large blocks that are not in use. One that no call has wanted for long goes back to the system.
class LargeBlocks {
 public:
  void* take(size_t bytes) {
    bytes = block_size(bytes);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++clock_;
      for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {  // the warmest first
        if (block->bytes != bytes) continue;
        void* memory = block->memory;
        blocks_.erase(std::next(block).base());
        return memory;
      }
    }
    void* memory = from_system(bytes, kHugePage);
    prefer_large_pages(memory, bytes);
    return memory;
  }

  // Keeps the block, unless `most_kept` of its size are here already.
  void put(void* memory, size_t bytes, int64_t most_kept) {
    bytes = block_size(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::count_if(blocks_.begin(), blocks_.end(), [=](const Block& b) { return b.bytes == bytes; }) >= most_kept) {
      std::free(memory);
      return;
    }
    blocks_.push_back({memory, bytes, clock_});
    while (clock_ - blocks_.front().clock > kPatience) {
      std::free(blocks_.front().memory);
      blocks_.erase(blocks_.begin());
    }
  }

 private:
  static constexpr int64_t kPatience = 200;  // blocks taken in the meantime

  struct Block {
    void* memory;
    size_t bytes;
    int64_t clock;  // when it was put back
  };

  std::mutex mutex_;
  std::vector<Block> blocks_;  // by clock
  int64_t clock_ = 0;          // blocks taken so far
};

// Never destroyed: threads may outlive main.
LargeBlocks& large_blocks() {
  static auto* blocks = new LargeBlocks;
  return *blocks;
}

}  // namespace

void* allocate(size_t bytes) { return bytes < kLarge ? from_system(bytes, kAlignment) : large_blocks().take(bytes); }

void release(void* memory, size_t bytes, int64_t most_kept) {
  if (memory == nullptr || bytes < kLarge) {
    std::free(memory);
  } else {
    large_blocks().put(memory, bytes, most_kept);
  }
}

}  // namespace flowtt::cpu
