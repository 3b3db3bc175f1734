// Numbers that the caller gave with something for LibTorch to keep, and gets back when LibTorch has
// let go of it. LibTorch does so on any thread, where no code of the caller may run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace ts {

class Returned {
 public:
  // Makes room for one more, so that put needs no memory.
  void expect() {
    const std::lock_guard<std::mutex> lock(mutex_);
    tokens_.reserve(tokens_.size() + kept_ + 1);
    ++kept_;
  }
  // Takes back an expect of which no put will follow.
  void unexpect() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    --kept_;
  }
  void put(int64_t token) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    --kept_;
    tokens_.push_back(token);
  }
  int64_t take(int64_t* tokens, int64_t capacity) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t count = 0;
    while (count < capacity && !tokens_.empty()) {
      tokens[count++] = tokens_.back();
      tokens_.pop_back();
    }
    return count;
  }

 private:
  std::mutex mutex_;
  std::vector<int64_t> tokens_;
  size_t kept_ = 0;
};

}  // namespace ts
