/* DLPack: tensors shared with other libraries of the process. */
#ifndef TS_DLPACK_H_
#define TS_DLPACK_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The structs of dlpack.h (github.com/dmlc/dlpack), which this header does not include. A struct is
 * the whole agreement between two libraries of one process: memory, shape, and a function that
 * gives the memory back. It says nothing of streams, which the calls below name.
 *
 * A default stream stands for that of the tensor's device. The other library's stream must exist
 * until the struct's deleter is called and the memory of an exported tensor has gone. flags:
 * TS_DLPACK_FLAG_ values, added. */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

enum {
  TS_DLPACK_FLAG_NO_ORDER = 1, /* the other library has ordered its stream; `stream` is not used */
  TS_DLPACK_FLAG_READ_ONLY = 2 /* import memory that is not to be written; the caller does not */
};

/* Makes a struct over the tensor's memory, which lives until the struct's deleter is called, by any
 * thread. The caller, or the library that it gives the struct to, calls the deleter once
 * (ts_dlpack_free). stream: where the other library uses the memory of a GPU. Work enqueued there
 * from now on starts after everything enqueued on the calling thread's current stream of the
 * device, and the memory is marked as used there. TS_ERROR_INVALID_ARGUMENT for a tensor that
 * requires a gradient, or without strided memory. TS_ERROR_CAPTURE in a capture. */
TS_API ts_error* ts_dlpack_export(const ts_tensor* tensor,
                                  ts_stream stream,
                                  int32_t flags,
                                  struct DLManagedTensor** managed);
TS_API ts_error* ts_dlpack_export_versioned(const ts_tensor* tensor,
                                            ts_stream stream,
                                            int32_t flags,
                                            struct DLManagedTensorVersioned** managed);

/* Makes a tensor over the struct's memory. Takes ownership of the struct if it succeeds. stream:
 * where the other library made the values, and takes the memory back. Work enqueued on the calling
 * thread's current stream of the device from now on starts after everything enqueued there so far.
 * When the last tensor that shares the memory has gone, work enqueued on `stream` starts after the
 * work so far of that current stream and of those of ts_tensor_record_stream, and then a thread of
 * the library calls the struct's deleter: never a thread that is inside another call. It is one
 * thread for all foreign memory, so a deleter that blocks holds back those that follow. exit waits
 * for it for a second at most, and no deleter is called later.
 *
 * The struct is checked: dimensions, sizes, strides, dtype, alignment, device and, for a GPU,
 * whose memory the pointer is. TS_ERROR_INVALID_ARGUMENT says what is wrong. Whether the memory is
 * as large as it says cannot be known. TS_ERROR_UNSUPPORTED for another major version of DLPack:
 * the caller then calls the deleter. TS_ERROR_CAPTURE in a capture. */
TS_API ts_error* ts_dlpack_import(struct DLManagedTensor* managed,
                                  ts_stream stream,
                                  int32_t flags,
                                  ts_tensor** tensor);
TS_API ts_error* ts_dlpack_import_versioned(struct DLManagedTensorVersioned* managed,
                                            ts_stream stream,
                                            int32_t flags,
                                            ts_tensor** tensor);

/* Calls the deleter of a struct that no library has taken. */
TS_API void ts_dlpack_free(struct DLManagedTensor* managed);
TS_API void ts_dlpack_free_versioned(struct DLManagedTensorVersioned* managed);

#ifdef __cplusplus
}
#endif

#endif /* TS_DLPACK_H_ */
