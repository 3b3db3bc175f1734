/* Pinned host memory outside LibTorch's allocators. */
#ifndef TS_PINNED_H_
#define TS_PINNED_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Page-locked memory for asynchronous copies from and to any device. */
typedef struct ts_pinned ts_pinned;

/* Allocates exactly `bytes` bytes (rounded up to a page), filled with zeros. Blocks for
 * milliseconds. */
TS_API ts_error* ts_pinned_new(size_t bytes, ts_pinned** pinned);

/* Pins existing memory: `bytes` bytes from `data` on, borrowed until ts_pinned_destroy, which
 * unpins and does not free it. The memory must not move. Returns TS_ERROR_INVALID_ARGUMENT if part
 * of it is already pinned, and TS_ERROR_UNSUPPORTED if the driver cannot pin such memory. Blocks
 * for milliseconds. */
TS_API ts_error* ts_pinned_register(uint8_t* data, size_t bytes, ts_pinned** pinned);

/* Lets the kernels of all GPUs read existing memory at its address, such as a mapping of a file.
 * Otherwise like ts_pinned_register. Reading `data` must not fault: this call reads all pages, from
 * the disk if necessary. Returns TS_ERROR_UNSUPPORTED if a GPU cannot read such memory. */
TS_API ts_error* ts_pinned_register_read_only(const uint8_t* data,
                                              size_t bytes,
                                              ts_pinned** pinned);

/* Frees or unpins the memory. It checks no event, and the driver may wait for the device. The
 * caller ensures that no copy from or to the memory is in flight, and that no graph with such a
 * copy is replayed again. */
TS_API ts_error* ts_pinned_destroy(ts_pinned* pinned);

/* Returns the memory, borrowed until ts_pinned_destroy. */
TS_API uint8_t* ts_pinned_data(const ts_pinned* pinned);
TS_API size_t ts_pinned_size(const ts_pinned* pinned);

/* Returns the total bytes of pinned memory that has not been destroyed. */
TS_API size_t ts_pinned_live_bytes(void);

#ifdef __cplusplus
}
#endif

#endif /* TS_PINNED_H_ */
