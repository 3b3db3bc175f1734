/* Tensors: creation, properties, copies and storage. */
#ifndef TS_TENSOR_H_
#define TS_TENSOR_H_

#include "torchstream/error.h"
#include "torchstream/event.h"
#include "torchstream/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A reference to a LibTorch tensor. Any thread may free it, without blocking: device memory returns
 * to the allocator in the order of the stream that it was allocated on. */
typedef struct ts_tensor ts_tensor;

/* LibTorch's c10::ScalarType. */
enum {
  TS_DTYPE_UINT8 = 0,
  TS_DTYPE_INT8 = 1,
  TS_DTYPE_INT16 = 2,
  TS_DTYPE_INT32 = 3,
  TS_DTYPE_INT64 = 4,
  TS_DTYPE_FLOAT16 = 5,
  TS_DTYPE_FLOAT32 = 6,
  TS_DTYPE_FLOAT64 = 7,
  TS_DTYPE_COMPLEX64 = 9,
  TS_DTYPE_COMPLEX128 = 10,
  TS_DTYPE_BOOL = 11,
  TS_DTYPE_BFLOAT16 = 15,
  TS_DTYPE_FLOAT8_E5M2 = 23,
  TS_DTYPE_FLOAT8_E4M3FN = 24
};

/* LibTorch's c10::MemoryFormat. */
enum { TS_MEMORY_FORMAT_CONTIGUOUS = 0, TS_MEMORY_FORMAT_CHANNELS_LAST = 2 };

/* Makes an uninitialised tensor of `ndim` dimensions with the given sizes. */
TS_API ts_error* ts_tensor_new(const int64_t* sizes,
                               int64_t ndim,
                               int32_t dtype,
                               int32_t device,
                               int32_t memory_format,
                               ts_tensor** tensor);

/* Makes an uninitialised CPU tensor in pinned memory of LibTorch's caching allocator, which keeps
 * freed memory for the next tensor of the same size (rounded up to a power of two). The memory is
 * not reused before all copies that this library enqueued from or to it are done. */
TS_API ts_error* ts_tensor_new_pinned(const int64_t* sizes,
                                      int64_t ndim,
                                      int32_t dtype,
                                      int32_t memory_format,
                                      ts_tensor** tensor);

/* Makes a CPU tensor with a copy of the data. `bytes` must equal the size that sizes and dtype
 * imply. */
TS_API ts_error* ts_tensor_from_data(const uint8_t* data,
                                     size_t bytes,
                                     const int64_t* sizes,
                                     int64_t ndim,
                                     int32_t dtype,
                                     ts_tensor** tensor);

/* Makes a contiguous CPU tensor over existing memory, without a copy. data: borrowed until the
 * tensor and everything that shares its storage is freed; it must not move. If the memory is
 * pinned, copies from it are asynchronous. */
TS_API ts_error* ts_tensor_from_memory(uint8_t* data,
                                       size_t bytes,
                                       const int64_t* sizes,
                                       int64_t ndim,
                                       int32_t dtype,
                                       ts_tensor** tensor);

/* Makes a CPU tensor over existing memory, without a copy. strides: in elements. data: `bytes`
 * bytes that contain every element; borrowed until the tensor and everything that shares its
 * storage is freed. ts_borrowed_take then returns the token. */
TS_API ts_error* ts_tensor_borrow(uint8_t* data,
                                  size_t bytes,
                                  const int64_t* sizes,
                                  const int64_t* strides,
                                  int64_t ndim,
                                  int32_t dtype,
                                  int64_t token,
                                  ts_tensor** tensor);

/* Moves the tokens of memory that no tensor uses any more to `tokens`, at most `capacity`, each
 * once. Returns their number. Does not block. */
TS_API int64_t ts_borrowed_take(int64_t* tokens, int64_t capacity);

/* Makes another reference to the same tensor. */
TS_API ts_error* ts_tensor_retain(const ts_tensor* tensor, ts_tensor** reference);
TS_API void ts_tensor_free(ts_tensor* tensor);

/* Frees `count` tensors. Takes ownership of each; the array is borrowed for the call. */
TS_API void ts_tensor_free_all(ts_tensor* const* tensors, int64_t count);

/* Returns the number of references in the process that have not been freed. */
TS_API int64_t ts_tensor_count(void);

typedef struct ts_tensor_info {
  int64_t numel; /* number of elements */
  size_t bytes;  /* numel * element_size, at most INT64_MAX */
  int32_t ndim;
  int32_t dtype; /* TS_DTYPE_, or another ScalarType of LibTorch */
  int32_t device;
  int32_t element_size; /* bytes */
  bool contiguous;
  bool channels_last; /* contiguous in that memory format */
  bool requires_grad;
  bool pinned;
} ts_tensor_info;

TS_API ts_error* ts_tensor_get_info(const ts_tensor* tensor, ts_tensor_info* info);

/* Writes the device and the dtype of each of `count` tensors to the two arrays. */
TS_API ts_error* ts_tensor_get_kinds(ts_tensor* const* tensors,
                                     int64_t count,
                                     int32_t* devices,
                                     int32_t* dtypes);

/* Writes the ndim sizes, and the strides in elements, to arrays of `capacity` values each. Either
 * array may be NULL. Returns TS_ERROR_INVALID_ARGUMENT if capacity < ndim. */
TS_API ts_error* ts_tensor_get_shape(const ts_tensor* tensor,
                                     int64_t* sizes,
                                     int64_t* strides,
                                     int64_t capacity);

/* Returns the address of the first element on the host or device, borrowed until the tensor is
 * freed. */
TS_API ts_error* ts_tensor_get_address(const ts_tensor* tensor, uintptr_t* address);

/* Marks the tensor's memory, which its views share, as lent: its owner will refill it, as a
 * prefetcher refills a slot. With lent false, removes the mark. */
TS_API ts_error* ts_tensor_set_lent(const ts_tensor* tensor, bool lent);
TS_API ts_error* ts_tensor_is_lent(const ts_tensor* tensor, bool* lent);

/* Copies src into dst, which has the same or a broadcastable shape and any dtype and device.
 * Between host and device the call returns when the copy is done; with non_blocking the host does
 * not wait where the hardware allows it (pinned memory, same dtype, contiguous). Between GPUs, or
 * within one, the copy is only enqueued. Autograd does not record the copy, so dst may be a
 * parameter.
 *
 * A non_blocking copy into host memory (here, in ts_tensor_to and in operators) writes the memory
 * after the call has returned. Calls of this library that read the tensor or return its address
 * wait for the copy. So does the work of a later copy from the tensor on another stream. Reads
 * through an address taken before the copy are not protected. A captured copy needs pinned memory,
 * otherwise TS_ERROR_CAPTURE. */
TS_API ts_error* ts_tensor_copy(ts_tensor* dst, const ts_tensor* src, bool non_blocking);

/* Converts to a device and dtype; -1 as dtype keeps it. result: the same tensor if nothing changes.
 */
TS_API ts_error* ts_tensor_to(const ts_tensor* tensor,
                              int32_t device,
                              int32_t dtype,
                              bool non_blocking,
                              ts_tensor** result);

/* Copies the elements, in logical order and contiguous, to host memory. `bytes` must equal their
 * size. Blocks until they have arrived. */
TS_API ts_error* ts_tensor_read(const ts_tensor* tensor, uint8_t* data, size_t bytes);

/* Returns the value of a tensor with one element, converted. Blocks until it is computed. Returns
 * TS_ERROR_INVALID_ARGUMENT for another number of elements. */
TS_API ts_error* ts_tensor_get_item(const ts_tensor* tensor, double* value);

/* Does ts_tensor_get_item for an integer. */
TS_API ts_error* ts_tensor_get_item_int(const ts_tensor* tensor, int64_t* value);

/* Records that the stream uses the memory. When the memory's last reference is freed, the memory is
 * not reused until the work that is on the stream at that time is done. The tensor must not be
 * resized until then. */
TS_API ts_error* ts_tensor_record_stream(const ts_tensor* tensor, ts_stream stream);

/* With bytes 0, frees the tensor's memory. Otherwise allocates `bytes` bytes for a tensor whose
 * memory was freed, on the current stream of its device, with undefined values. All tensors that
 * share the memory, including those saved for backward, then have the new memory. In between,
 * reading or writing any of them crashes.
 *
 * Freed memory belongs to the stream that was current when it was allocated: order that stream
 * after all other uses before the call. Returns TS_ERROR_INVALID_ARGUMENT for memory that is not
 * LibTorch's, and if the tensor has memory while `bytes` is not 0. Memory allocated in a capture
 * belongs to the graph, whose replays use it: free it before the capture ends. Returns
 * TS_ERROR_CAPTURE in a capture for memory allocated before it. */
TS_API ts_error* ts_tensor_resize_storage(ts_tensor* tensor, size_t bytes);

/* Does one step of a prefetcher on `stream`: waits for `after` (NULL: no wait), copies src[i] into
 * dst[i] without blocking for each of `count` pairs, and records `done` (NULL: no record). The
 * tensors of a pair have equal shapes and dtypes, and at least one of them is on the stream's
 * device. Between host and device the strides are equal and dense, and the host memory is pinned.
 * Otherwise the call returns TS_ERROR_INVALID_ARGUMENT and enqueues nothing. The caller must not
 * change the memory until `done` is complete. */
TS_API ts_error* ts_tensor_copy_batch(ts_stream stream,
                                      const ts_event* after,
                                      ts_tensor* const* dst,
                                      ts_tensor* const* src,
                                      int64_t count,
                                      ts_event* done);

/* Copies src[i] to dst[i] between GPUs, for each of `count` pairs. dst is on dst_stream's device
 * and src on src_stream's. The tensors of a pair have equal shapes and dtypes; otherwise the call
 * returns TS_ERROR_INVALID_ARGUMENT and enqueues nothing. The copies run on src_stream, after all
 * work that was enqueued on either stream before the call. Work that is enqueued on either stream
 * after the call starts after the copies. The host does not block. Strides that differ, or are not
 * dense, need temporary memory. The caller must not change src until the copies are done. The
 * devices may be the same. In a capture dst_stream must take part, src_stream joins, and the
 * strides of a copy between GPUs must be equal; otherwise TS_ERROR_CAPTURE. */
TS_API ts_error* ts_tensor_copy_peer(ts_stream dst_stream,
                                     ts_tensor* const* dst,
                                     ts_stream src_stream,
                                     ts_tensor* const* src,
                                     int64_t count);

#ifdef __cplusplus
}
#endif

#endif /* TS_TENSOR_H_ */
