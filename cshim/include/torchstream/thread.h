/* Threads: LibTorch's parallelism, and counts of threads for tests. */
#ifndef TS_THREAD_H_
#define TS_THREAD_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets the number of threads that LibTorch uses inside one operator on the CPU, for the whole
 * process. */
TS_API ts_error* ts_parallelism_set(int32_t threads);

/* Returns the number of threads that LibTorch uses inside one operator on the CPU. */
TS_API int32_t ts_parallelism(void);

/* Returns the number of living OS threads that have entered LibTorch through a tensor, operator,
 * stream or event call. */
TS_API int64_t ts_thread_count(void);

/* Returns the number of OS threads that hold handles of cuBLAS, cuDNN and cuSOLVER. It is at most
 * 20: operators of further threads run on these threads. Threads of backward (one for each device)
 * are not counted. */
TS_API int64_t ts_library_thread_count(void);

/* Returns the operating system's id of the calling thread, for tests of thread affinity. */
TS_API int64_t ts_thread_id(void);

#ifdef __cplusplus
}
#endif

#endif /* TS_THREAD_H_ */
