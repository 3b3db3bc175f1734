// Names of threads in recordings.
#pragma once

#include <cstdint>

namespace ts {

// The kernel's id of a thread that Kineto names in CUDA calls. If Kineto has seen no operator on
// the thread, it names it by the lower half of its pthread_t. Otherwise it uses the kernel's id of
// the first thread that had this pthread_t, which may have ended. Returns the argument if no such
// thread has entered the library.
int64_t thread_id_of(int64_t thread);

}  // namespace ts
