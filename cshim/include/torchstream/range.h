/* Ranges: named parts of the program, for profilers. */
#ifndef TS_RANGE_H_
#define TS_RANGE_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NVTX ranges (nvtxRangeStartEx, nvtxRangeEnd). A range may end on another thread than it started
 * on, and ranges need not nest. They need no GPU. */

/* Returns a counter, valid for the life of the process, that is nonzero while an NVTX tool is
 * attached or a trace logs ranges. It changes while the program runs: read it atomically. While it
 * is 0 the functions below do nothing. */
TS_API const int32_t* ts_range_listeners(void);

/* Starts a range. range: for exactly one ts_range_end; 0 if nobody listens. */
TS_API ts_error* ts_range_start(const char* name, uint64_t* range);

/* Ends a range; 0 is accepted. Returns TS_ERROR_INVALID_ARGUMENT for a range that has already
 * ended. */
TS_API ts_error* ts_range_end(uint64_t range);

/* Marks a point in time. */
TS_API ts_error* ts_range_mark(const char* name);

#ifdef __cplusplus
}
#endif

#endif /* TS_RANGE_H_ */
