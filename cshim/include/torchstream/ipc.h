/* Tensors in other processes' memory and in files. */
#ifndef TS_IPC_H_
#define TS_IPC_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TS_IPC_HANDLE_BYTES 64
/* Writes a handle of TS_IPC_HANDLE_BYTES bytes for the allocation that contains the tensor on a
 * GPU, and the offset of its first element in the allocation, in bytes. The tensor must stay alive
 * until no other process uses the memory. Returns TS_ERROR_INVALID_ARGUMENT for memory of
 * expandable segments, or of another library or process. */
TS_API ts_error* ts_ipc_export(const ts_tensor* tensor, uint8_t* handle, size_t* offset);

/* Makes a tensor in another process's memory, with `ndim` sizes and strides in elements. The
 * current stream does not wait for the other process. lock: a file descriptor, or -1; the tensor
 * owns it if the call succeeds. When the last tensor that shares the memory is freed, a thread of
 * the library waits for the work so far of the stream that was current at the call, and of all
 * streams given to ts_tensor_record_stream. It then unmaps the memory and closes `lock`. Returns
 * TS_ERROR_INVALID_ARGUMENT for elements outside the allocation. */
TS_API ts_error* ts_ipc_open(int32_t device,
                             const uint8_t* handle,
                             size_t offset,
                             const int64_t* sizes,
                             const int64_t* strides,
                             int64_t ndim,
                             int32_t dtype,
                             int32_t lock,
                             ts_tensor** tensor);

/* Makes a contiguous CPU tensor over a shared mapping of a file, starting at `offset`, a multiple
 * of the page size. file: a descriptor, which the tensor owns if the call succeeds. A thread of the
 * library unmaps and closes the file when the last tensor that shares the memory is freed. The file
 * must not shrink. */
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
