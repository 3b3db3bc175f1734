// State of each OS thread that enters LibTorch.
#pragma once

#include <cstdint>

namespace ts {

// The calling thread's number: 1, 2, ... in the order of entering, never used twice (the kernel's
// thread ids are). 0 until the thread has entered, and again while its thread-local objects are
// being destroyed. __thread and initial-exec instead of thread_local: every call that reaches
// LibTorch reads it, and this form is one load without a call.
extern __thread uint64_t thread_number __attribute__((tls_model("initial-exec")));

void first_entry() noexcept;

// Every exported function that reaches LibTorch calls this first. It counts the thread and keeps
// LibTorch's warnings, which would go to stderr, off the calling thread.
inline void enter_thread() noexcept {
  if (__builtin_expect(thread_number == 0, 0)) first_entry();
}

// Whether the calling thread is one of LibTorch's own, such as a device's thread of backward, and
// has entered only to run code of the library's caller.
extern __thread bool library_thread __attribute__((tls_model("initial-exec")));

// What a call out of LibTorch into code of the library's caller begins with.
inline void enter_from_library() noexcept {
  if (thread_number == 0) library_thread = true;
  enter_thread();
}

}  // namespace ts
