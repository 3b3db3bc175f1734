/* Tensors in the memory of other processes, and of files. */
#ifndef TS_IPC_H_
#define TS_IPC_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TS_IPC_HANDLE_BYTES 64
/* Writes the handle of TS_IPC_HANDLE_BYTES bytes of the allocation that the tensor on a GPU lies
 * in, and the distance of its first element from the allocation's begin. The tensor has to live
 * until no other process uses the memory. TS_ERROR_INVALID_ARGUMENT for memory of expandable
 * segments, or of another library or process. */
TS_API ts_error* ts_ipc_export(const ts_tensor* tensor, uint8_t* handle, size_t* offset);

/* Makes a tensor in the memory of another process, with `ndim` sizes and strides in elements. The
 * current stream does not wait for the other process. When the last tensor that shares the memory
 * has gone, and the work so far of the stream that was current at the call, and of those of
 * ts_tensor_record_stream, is done, a thread of the library unmaps the memory and closes `lock`.
 * lock: a file descriptor, or -1; taken over if the call succeeds. TS_ERROR_INVALID_ARGUMENT for
 * elements outside of the allocation. */
TS_API ts_error* ts_ipc_open(int32_t device,
                             const uint8_t* handle,
                             size_t offset,
                             const int64_t* sizes,
                             const int64_t* strides,
                             int64_t ndim,
                             int32_t dtype,
                             int32_t lock,
                             ts_tensor** tensor);

/* Makes a contiguous CPU tensor over a shared mapping of a file, from `offset` on, a multiple of
 * the page size. file: a descriptor, taken over if the call succeeds; a thread of the library
 * unmaps and closes it when the last tensor that shares the memory has gone. The file must not
 * shrink. */
TS_API ts_error* ts_tensor_map(int32_t file,
                               size_t offset,
                               const int64_t* sizes,
                               int64_t ndim,
                               int32_t dtype,
                               ts_tensor** tensor);

#ifdef __cplusplus
}
#endif

#endif /* TS_IPC_H_ */
