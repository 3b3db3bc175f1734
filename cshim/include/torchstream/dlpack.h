/* DLPack: tensors shared with other libraries in the process. */
#ifndef TS_DLPACK_H_
#define TS_DLPACK_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The structs of dlpack.h (github.com/dmlc/dlpack), which this header does not include. A struct is
 * the whole agreement between two libraries in one process: memory, shape, and a deleter that
 * returns the memory. It does not mention streams; the calls below take them.
 *
 * A default stream means the default stream of the tensor's device. The other library's stream must
 * exist until the struct's deleter is called and the memory of an exported tensor is freed. flags:
 * TS_DLPACK_FLAG_ values, combined with "or". */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

enum {
  TS_DLPACK_FLAG_NO_ORDER =
      1, /* the other library orders its stream itself; `stream` is not used */
  TS_DLPACK_FLAG_READ_ONLY = 2 /* import memory that must not be written; the caller ensures it */
};

/* Makes a struct over the tensor's memory, which stays alive until the struct's deleter is called,
 * on any thread. The caller, or the library that it passes the struct to, calls the deleter once
 * (ts_dlpack_free). stream: the stream on which the other library uses a GPU's memory. The call
 * makes this stream wait for the calling thread's current stream of the device, and records the
 * memory as used on it. Returns TS_ERROR_INVALID_ARGUMENT for a tensor that requires grad or has no
 * strided memory, and TS_ERROR_CAPTURE in a capture. */
TS_API ts_error* ts_dlpack_export(const ts_tensor* tensor,
                                  ts_stream stream,
                                  int32_t flags,
                                  struct DLManagedTensor** managed);
TS_API ts_error* ts_dlpack_export_versioned(const ts_tensor* tensor,
                                            ts_stream stream,
                                            int32_t flags,
                                            struct DLManagedTensorVersioned** managed);

/* Makes a tensor over the struct's memory. Takes ownership of the struct if it succeeds.
 *
 * stream: the stream on which the other library computed the values and will reuse the memory. The
 * call makes the calling thread's current stream of the device wait for `stream`. When the last
 * tensor that shares the memory is freed, `stream` waits for the work enqueued until then on that
 * current stream and on all streams given to ts_tensor_record_stream. A thread of the library then
 * calls the struct's deleter, never inside another call. One thread does this for all foreign
 * memory, so a deleter that blocks delays the next ones. exit() waits at most a second for this
 * thread, and no deleter is called after that.
 *
 * The call checks the struct: dimensions, sizes, strides, dtype, alignment, device and, for a GPU,
 * which device the pointer belongs to. TS_ERROR_INVALID_ARGUMENT says what is wrong. The call
 * cannot check that the memory is as large as the struct says. Returns TS_ERROR_UNSUPPORTED for
 * another major version of DLPack: the caller then calls the deleter. Returns TS_ERROR_CAPTURE in a
 * capture. */
TS_API ts_error* ts_dlpack_import(struct DLManagedTensor* managed,
                                  ts_stream stream,
                                  int32_t flags,
                                  ts_tensor** tensor);
TS_API ts_error* ts_dlpack_import_versioned(struct DLManagedTensorVersioned* managed,
                                            ts_stream stream,
                                            int32_t flags,
                                            ts_tensor** tensor);

/* Calls the deleter of a struct that no library has imported. */
TS_API void ts_dlpack_free(struct DLManagedTensor* managed);
TS_API void ts_dlpack_free_versioned(struct DLManagedTensorVersioned* managed);

#ifdef __cplusplus
}
#endif

#endif /* TS_DLPACK_H_ */
