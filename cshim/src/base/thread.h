// State of each OS thread that enters LibTorch.
#pragma once

#include <cstdint>

namespace ts {

// The calling thread's number: 1, 2, ... in the order of entering, never reused (the kernel's
// thread ids are). It is 0 until the thread has entered, and again while its thread-local objects
// are destroyed. Every call that reaches LibTorch reads it. So it is __thread and initial-exec
// instead of thread_local: one load without a call.
extern __thread uint64_t thread_number __attribute__((tls_model("initial-exec")));

void first_entry() noexcept;

// Every exported function that reaches LibTorch calls this first. It counts the thread, and keeps
// LibTorch's warnings on this thread from stderr.
inline void enter_thread() noexcept {
  if (__builtin_expect(thread_number == 0, 0)) first_entry();
}

// Whether the calling thread is one of LibTorch's own, such as a device's backward thread, and has
// entered only to run the caller's code.
extern __thread bool library_thread __attribute__((tls_model("initial-exec")));

// The first call wherever LibTorch calls the caller's code.
inline void enter_from_library() noexcept {
  if (thread_number == 0) library_thread = true;
  enter_thread();
}

}  // namespace ts
