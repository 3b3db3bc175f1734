// How malloc gives memory back to the kernel. A training step on the CPU frees its activations and
// gradients, and the next one allocates as much again. With malloc's defaults most of that memory
// goes back to the kernel in between, which then has to clear its pages once more.
#include <malloc.h>

#include <cstdlib>
#include <cstring>

namespace {

// Whether the environment has settings of malloc, which come first.
bool is_configured() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return (tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr) ||
         std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr ||
         std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr;
}

// Runs when the library is loaded. 32 MiB is the most that malloc comes to by itself, when blocks
// of that size are freed.
[[gnu::constructor]] void keep_freed_memory() {
  constexpr int kLargestBlock = 32 << 20;
  constexpr int kKeptAtMost = 1 << 30;
  if (is_configured()) return;
  mallopt(M_MMAP_THRESHOLD, kLargestBlock);
  mallopt(M_TRIM_THRESHOLD, kKeptAtMost);
}

}  // namespace
