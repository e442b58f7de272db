// Uninitialised scratch memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace flowtt::cpu {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Uninitialised memory, aligned; `release` takes the same number of bytes, or null. Large blocks are kept for the next
// calls, of those with a limit `most_kept` of about one size: to get their pages from the system again would cost more
// than to fill them. Both throw only std::bad_alloc.
void* allocate(size_t bytes);
void release(void* memory, size_t bytes, int64_t most_kept = kNoLimit);

// Every call of an op begins with this: blocks that no call has wanted for long go back to the system.
void begin_call();

// Gives back all that is kept, and what malloc keeps.
void release_kept();

int64_t kept_bytes();

// An aligned array of plain data. Pages that are never written take no memory, so a generous size is cheap.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size) : size_(size) {
    if (size == 0) return;
    data_ = static_cast<T*>(allocate(size * sizeof(T)));
  }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { release(data_, size_ * sizeof(T)); }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Scratch memory for one piece of work after the other: what a piece takes is free again for the next.
class Arena {
 public:
  // Uninitialised and aligned, valid until `clear`.
  template <class T>
  T* take(int64_t size) {
    const size_t bytes = (static_cast<size_t>(size) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (blocks_.empty() || blocks_.back().size() - used_ < bytes) {
      blocks_.emplace_back(std::max(bytes, kSmallestBlock));
      used_ = 0;
    }
    T* taken = reinterpret_cast<T*>(blocks_.back().data() + used_);
    used_ += bytes;
    return taken;
  }

  // Gives back all that was taken. The memory stays, as one block that is as large as was needed so far.
  void clear() {
    if (blocks_.size() > 1) {
      size_t total = 0;
      for (const Buffer<char>& block : blocks_) total += block.size();
      blocks_.clear();
      blocks_.emplace_back(total);
    }
    used_ = 0;
  }

 private:
  static constexpr size_t kSmallestBlock = size_t{1} << 17;

  std::vector<Buffer<char>> blocks_;
  size_t used_ = 0;  // of the last block
};

}  // namespace flowtt::cpu
