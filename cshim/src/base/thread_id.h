// Names of threads in recordings.
#pragma once

#include <cstdint>

namespace ts {

// The kernel's id of a thread as Kineto names it in CUDA calls: by the lower half of its pthread_t,
// if it has seen no operator in it; otherwise by the kernel's id of the first thread that had this
// pthread_t, which may have ended since. The argument itself, if no such thread has entered the
// library.
int64_t thread_id_of(int64_t thread);

}  // namespace ts
