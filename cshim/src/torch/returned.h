// Numbers that the caller passed with an object that LibTorch keeps, to be returned when LibTorch
// releases the object. LibTorch releases it on any thread, where no code of the caller may run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace ts {

class Returned {
 public:
  // Makes room for one more number, so that put allocates nothing.
  void expect() {
    const std::lock_guard<std::mutex> lock(mutex_);
    tokens_.reserve(tokens_.size() + kept_ + 1);
    ++kept_;
  }
  // Undoes an expect that no put will follow.
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
