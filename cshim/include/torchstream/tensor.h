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
 * to the allocator in the order of the stream on which it was allocated. */
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

/* Makes an uninitialised tensor with the `ndim` sizes. */
TS_API ts_error* ts_tensor_new(const int64_t* sizes,
                               int64_t ndim,
                               int32_t dtype,
                               int32_t device,
                               int32_t memory_format,
                               ts_tensor** tensor);

/* Makes an uninitialised CPU tensor in pinned memory of LibTorch's caching allocator, which keeps
 * freed memory for the next tensor of its size (rounded up to a power of two). The memory is not
 * handed out again before copies that this library enqueued from or to it are done. */
TS_API ts_error* ts_tensor_new_pinned(const int64_t* sizes,
                                      int64_t ndim,
                                      int32_t dtype,
                                      int32_t memory_format,
                                      ts_tensor** tensor);

/* Makes a CPU tensor with a copy of the data. bytes must be what sizes and dtype need. */
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

/* Makes a CPU tensor with these strides, in elements, over existing memory, without a copy. data:
 * `bytes` bytes that contain every element; borrowed until the tensor and everything that shares
 * its storage is freed, and then given back by ts_borrowed_take, with the token. */
TS_API ts_error* ts_tensor_borrow(uint8_t* data,
                                  size_t bytes,
                                  const int64_t* sizes,
                                  const int64_t* strides,
                                  int64_t ndim,
                                  int32_t dtype,
                                  int64_t token,
                                  ts_tensor** tensor);

/* Takes the tokens of memory that no tensor uses any more: at most `capacity`, each once. Returns
 * their number. Does not block. */
TS_API int64_t ts_borrowed_take(int64_t* tokens, int64_t capacity);

/* Makes one more reference to the same tensor. */
TS_API ts_error* ts_tensor_retain(const ts_tensor* tensor, ts_tensor** reference);
TS_API void ts_tensor_free(ts_tensor* tensor);

/* Frees `count` tensors. Takes ownership of each; the array is borrowed for the call. */
TS_API void ts_tensor_free_all(ts_tensor* const* tensors, int64_t count);

/* Returns the number of references in the process that are not yet freed. */
TS_API int64_t ts_tensor_count(void);

typedef struct ts_tensor_info {
  int64_t numel; /* number of elements */
  size_t bytes;  /* numel * element_size; INT64_MAX if that is more */
  int32_t ndim;
  int32_t dtype; /* TS_DTYPE_, or another of LibTorch's */
  int32_t device;
  int32_t element_size; /* bytes */
  bool contiguous;
  bool channels_last; /* contiguous in that memory format */
  bool requires_grad;
  bool pinned;
} ts_tensor_info;

TS_API ts_error* ts_tensor_get_info(const ts_tensor* tensor, ts_tensor_info* info);

/* Returns the device and the dtype of `count` tensors, in arrays of as many values. */
TS_API ts_error* ts_tensor_get_kinds(ts_tensor* const* tensors,
                                     int64_t count,
                                     int32_t* devices,
                                     int32_t* dtypes);

/* Returns sizes and strides in elements, in arrays of `capacity` values each, filled up to ndim;
 * either may be NULL. TS_ERROR_INVALID_ARGUMENT if capacity < ndim. */
TS_API ts_error* ts_tensor_get_shape(const ts_tensor* tensor,
                                     int64_t* sizes,
                                     int64_t* strides,
                                     int64_t capacity);

/* Returns the address of the first element on the host or device, borrowed until the tensor is
 * freed. */
TS_API ts_error* ts_tensor_get_address(const ts_tensor* tensor, uintptr_t* address);

/* Marks the tensor's memory, which its views share, as lent: its owner refills it, as a prefetcher
 * refills a slot. lent false takes the mark away. */
TS_API ts_error* ts_tensor_set_lent(const ts_tensor* tensor, bool lent);
TS_API ts_error* ts_tensor_is_lent(const ts_tensor* tensor, bool* lent);

/* Copies src into dst, of the same or a broadcastable shape and any dtype and device. Between host
 * and device it returns when the copy is done; with non_blocking the host does not wait where the
 * hardware allows it (pinned memory, same dtype, contiguous). Between GPUs, or within one, the copy
 * is only enqueued. It is not recorded for backward, so a parameter can be filled.
 *
 * A non_blocking copy into host memory, here, in ts_tensor_to and in operators, writes the memory
 * after the call. Calls of this header that read the tensor, or return its address, wait for the
 * copy; so does work that a later copy from the tensor enqueues on another stream. Memory that the
 * program reads through an address from before the copy is not protected. A captured copy needs
 * pinned memory: TS_ERROR_CAPTURE. */
TS_API ts_error* ts_tensor_copy(ts_tensor* dst, const ts_tensor* src, bool non_blocking);

/* Converts to a device and dtype (-1 keeps it). result: the same tensor if there is nothing to do.
 */
TS_API ts_error* ts_tensor_to(const ts_tensor* tensor,
                              int32_t device,
                              int32_t dtype,
                              bool non_blocking,
                              ts_tensor** result);

/* Copies the elements, in logical order and contiguous, to `bytes` bytes of host memory, exactly as
 * many as they take. Blocks until they have arrived. */
TS_API ts_error* ts_tensor_read(const ts_tensor* tensor, uint8_t* data, size_t bytes);

/* Returns the only element, converted. Blocks until it is computed. TS_ERROR_INVALID_ARGUMENT
 * unless the tensor has one element. */
TS_API ts_error* ts_tensor_get_item(const ts_tensor* tensor, double* value);

/* Does ts_tensor_get_item for an integer. */
TS_API ts_error* ts_tensor_get_item_int(const ts_tensor* tensor, int64_t* value);

/* Marks the memory as used on the stream: after its last reference is freed it is not handed out
 * again before the stream's work so far is done. The tensor must not be resized until then. */
TS_API ts_error* ts_tensor_record_stream(const ts_tensor* tensor, ts_stream stream);

/* Frees the tensor's memory, with bytes 0, or allocates `bytes` bytes in its place, on the current
 * stream of its device, with undefined values. All tensors that share the memory, those that
 * backward saved included, then have the new one. Until it is allocated again, whoever reads or
 * writes one of them crashes. Freed memory belongs to the stream that was current when it was
 * allocated: order that after all other uses before. TS_ERROR_INVALID_ARGUMENT for memory that is
 * not LibTorch's, and if there is memory while `bytes` is not 0. Memory that is allocated in a
 * capture is the graph's: free it before the end of the capture, and replays have it meanwhile.
 * TS_ERROR_CAPTURE in a capture for memory from before. */
TS_API ts_error* ts_tensor_resize_storage(ts_tensor* tensor, size_t bytes);

/* Does one step of a prefetcher on `stream`: waits for `after` (NULL: nothing), copies src[i] into
 * dst[i] without blocking for each of `count` pairs, and records `done` (NULL: nothing). Each pair
 * has equal shape and dtype; one or both are on the stream's device; between host and device the
 * strides are equal and dense and the host memory is pinned. Otherwise TS_ERROR_INVALID_ARGUMENT,
 * and nothing is enqueued. The memory must stay as it is until `done`. */
TS_API ts_error* ts_tensor_copy_batch(ts_stream stream,
                                      const ts_event* after,
                                      ts_tensor* const* dst,
                                      ts_tensor* const* src,
                                      int64_t count,
                                      ts_event* done);

/* Copies between GPUs with both streams named: dst[i], on dst_stream's device, from src[i], on
 * src_stream's device, for each of `count` pairs of equal shape and dtype. Otherwise
 * TS_ERROR_INVALID_ARGUMENT, and nothing is enqueued. The copies run on src_stream, after
 * everything enqueued on either stream so far; work enqueued on either from now on starts after
 * them. The host does not block. Strides that differ, or are not dense, need temporary memory. src
 * must stay as it is until the copies are done. The devices may be the same. In a capture
 * dst_stream must take part, src_stream joins, and strides between GPUs must be equal: otherwise
 * TS_ERROR_CAPTURE. */
TS_API ts_error* ts_tensor_copy_peer(ts_stream dst_stream,
                                     ts_tensor* const* dst,
                                     ts_stream src_stream,
                                     ts_tensor* const* src,
                                     int64_t count);

#ifdef __cplusplus
}
#endif

#endif /* TS_TENSOR_H_ */
