// Names of threads in recordings.
#pragma once

#include <cstdint>

namespace ts {

// The kernel's id of a thread that CUPTI names by the lower half of its pthread_t; what was given,
// if no such thread has entered the library.
int64_t thread_id_of(int64_t cupti_thread);

}  // namespace ts
