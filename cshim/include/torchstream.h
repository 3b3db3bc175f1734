/* torchstream: LibTorch streams, events, memory, tensors and operators as plain C. The library is
 * libtorchstream; errors and images come from libtorchstream_image, which it uses.
 *
 * Rules that hold for every function here and in torchstream_image.h:
 *
 *  - A function that can fail returns ts_error*: NULL means success; otherwise the caller owns the
 *    error and frees it with ts_error_free. There is no "last error": the next call may come from
 *    another thread. On failure output parameters are left untouched. Arguments are checked before
 *    anything is done; when CUDA or an operator fails in the middle of a call (TS_ERROR_CUDA,
 *    OPERATOR, OUT_OF_MEMORY), what the call had enqueued until then stays enqueued.
 *  - Ownership is said at each pointer: "borrowed for the call", "borrowed until X is freed", "new
 *    reference, free with Y", "takes ownership". A `_free` function accepts NULL. One that returns
 *    an error says when it does not take ownership. No function crashes for a NULL object: those
 *    without an error return NULL, 0 or "" for it, a descriptor is -1.
 *  - Thread state (current device, current stream, grad mode, where memory comes from) never
 *    survives a call. The exceptions are the calls that exist to change it: ts_set_cuda_stream, and
 *    the pairs ts_stream_guard_enter / ts_stream_guard_exit, ts_memory_pool_enter /
 *    ts_memory_pool_exit and ts_graph_begin / ts_graph_end (or ts_graph_free), each of whose halves
 *    are called on the same thread.
 *  - Work is enqueued on the calling thread's current stream of the device concerned, unless a
 *    function takes a stream.
 *  - Every symbol exists in every build. On a machine without a usable GPU a call that needs one
 *    returns TS_ERROR_NO_DEVICE.
 *  - Any thread may call any function unless it says otherwise; one object must not be used by two
 *    threads at once unless its group says that it may.
 */
#ifndef TORCHSTREAM_H_
#define TORCHSTREAM_H_

#include "torchstream_image.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version --------------------------------------------------------------------------------- */

/* Changes whenever a signature, a struct or an enum value below changes. A client compares it with
 * ts_abi_version() once at load. */
#define TS_ABI_VERSION 2

TS_API int32_t ts_abi_version(void);

/* Static, NUL-terminated; never freed. */
/* for example "2.11.0" */
TS_API const char* ts_libtorch_version(void);
/* the toolkit that the shim was built with, for example "13.0" */
TS_API const char* ts_cuda_version(void);

/* ---- devices --------------------------------------------------------------------------------- */

/* A device is an index: 0 ... count-1 is a GPU, TS_DEVICE_CPU is the host. */
#define TS_DEVICE_CPU (-1)

/* 0 without a GPU or driver; never fails. */
TS_API int32_t ts_device_count(void);

typedef struct ts_device_properties {
  char name[256]; /* NUL-terminated */
  int32_t major;  /* compute capability */
  int32_t minor;
  int32_t multiprocessors;
  int32_t async_engines; /* copy engines */
  int64_t total_bytes;
} ts_device_properties;

TS_API ts_error* ts_device_describe(int32_t device, ts_device_properties* out);

typedef struct ts_memory_stats {
  int64_t allocated_bytes;      /* in live tensors, by LibTorch's caching allocator */
  int64_t peak_allocated_bytes; /* since the start or the last ts_device_reset_peak */
  int64_t reserved_bytes;       /* held from the driver by the caching allocator */
  int64_t peak_reserved_bytes;
  int64_t free_bytes; /* what the driver can still give, to all processes */
  int64_t total_bytes;
} ts_memory_stats;

TS_API ts_error* ts_device_memory(int32_t device, ts_memory_stats* out);
TS_API ts_error* ts_device_reset_peak(int32_t device);
typedef struct ts_allocator_stats { /* of LibTorch's caching allocator, at present if not said */
  int64_t requested_bytes;          /* what live tensors asked for; allocated_bytes is rounded up */
  int64_t active_bytes;             /* live, or freed and still used by a recorded stream */
  int64_t split_bytes;              /* free parts of segments that are also in use: fragmentation */
  int64_t allocations;              /* live */
  int64_t total_allocations;        /* since the start */
  int64_t segments;                 /* held from the driver */
  int64_t driver_allocations;       /* since the start: cudaMalloc */
  int64_t driver_frees;             /* since the start: cudaFree */
  int64_t retries;                  /* since the start: the cache was emptied to make room */
  int64_t out_of_memory;            /* since the start: there was no room even so */
} ts_allocator_stats;
TS_API ts_error* ts_device_allocator(int32_t device, ts_allocator_stats* out);
/* The caching allocator takes no more than this share of the device's memory from the driver: over
 * 0 to 1. */
TS_API ts_error* ts_device_limit_memory(int32_t device, double fraction);
/* Whether `device` can read and write the memory of `peer` by itself (NVLink, or PCI Express where
 * the machine allows it). Without, copies between the two go through the host. */
TS_API ts_error* ts_device_can_access_peer(int32_t device, int32_t peer, bool* can);
/* Every device; gives unused reserved memory back to the driver, and pinned memory that LibTorch
 * keeps for its own copies. Waits for the end of a capture.
 * BUSY while a thread is inside a memory pool. */
TS_API ts_error* ts_device_empty_cache(void);
/* blocks until all work queued on the device is done */
TS_API ts_error* ts_device_synchronize(int32_t device);

/* ---- memory pools ------------------------------------------------------------------------------
 */

/* A part of LibTorch's caching allocator of its own: what is allocated in it shares no segment with
 * anything else, so that its end gives whole segments back. Not to be entered by two threads at
 * once; otherwise any number of threads. */
typedef struct ts_memory_pool ts_memory_pool;
/* new reference, free with ts_memory_pool_free */
TS_API ts_error* ts_memory_pool_new(int32_t device, ts_memory_pool** out);
/* Takes ownership, except with INVALID_ARGUMENT: a thread is inside the pool. Tensors in it stay
 * good. What is free in it goes back to the driver at once, or, if something is captured or a
 * thread is inside another pool, when the next pool is freed or capture begun; as does, or with
 * ts_device_empty_cache, the memory of tensors that are freed later. */
TS_API ts_error* ts_memory_pool_free(ts_memory_pool* pool);
/* From enter to exit all that the calling thread allocates on the pool's device is from the pool
 * (not what other threads do on its behalf: the backward of a device has a thread of its own; and
 * not what is captured, which has memory of its own). INVALID_ARGUMENT if it is entered already,
 * CAPTURE if the thread takes part in a capture; exit on another thread is WRONG_THREAD. While a
 * thread is inside, memory that is freed after ts_tensor_record_stream is kept. */
TS_API ts_error* ts_memory_pool_enter(ts_memory_pool* pool);
TS_API ts_error* ts_memory_pool_exit(ts_memory_pool* pool);
/* Bytes held from the driver, and those in live tensors. Walks the allocator's segments. */
TS_API ts_error* ts_memory_pool_bytes(ts_memory_pool* pool, int64_t* reserved, int64_t* allocated);

/* ---- streams --------------------------------------------------------------------------------- */

/* A stream is a value (LibTorch's packed form): comparable, copied freely, nothing to free. id 0 is
 * the device's default stream. Streams may be used by any number of threads at once. Only values
 * made by the functions of this group are valid. */
typedef struct ts_stream {
  int64_t id;
  int32_t device;
} ts_stream;

/* The next stream of LibTorch's pool: 32 a device and priority, handed out in turn, never
 * destroyed, so the 33rd request is the 1st stream again. Pool streams do not order themselves
 * against the default stream. priority: 0 normal, -1 ... ts_stream_priority_range's lowest, lower
 * is more urgent. */
TS_API ts_error* ts_stream_from_pool(int32_t device, int32_t priority, ts_stream* out);
TS_API ts_error* ts_stream_default(int32_t device, ts_stream* out);
/* Wraps a cudaStream_t made elsewhere. The handle is borrowed until the last tensor that used the
 * stream is freed: its maker destroys it after that. Handle 0 is the default stream;
 * cudaStreamLegacy and cudaStreamPerThread are refused (LibTorch cannot name them). */
TS_API ts_error* ts_stream_external(uintptr_t cuda_stream, int32_t device, ts_stream* out);
/* Ends the use of a wrapped stream, before its maker destroys it: the value is INVALID_ARGUMENT
 * from then on, everywhere, until the address is wrapped again. */
TS_API ts_error* ts_stream_forget(ts_stream stream);
/* A stream that nobody else gets, as a pool stream otherwise, however many there are. Give it back
 * with ts_stream_free. */
TS_API ts_error* ts_stream_new(int32_t device, int32_t priority, ts_stream* out);
/* Takes a stream of ts_stream_new back; waits for nothing. The value is INVALID_ARGUMENT from then
 * on. The CUDA stream is never destroyed, since LibTorch remembers streams beyond their use (memory
 * marked as used on it, backward of what ran on it): ts_stream_new hands it out again, once the
 * work on it is done. It must not be current on any thread any more. */
TS_API ts_error* ts_stream_free(ts_stream stream);
/* Whether the two are one queue: equal values, or one CUDA stream known by two values. */
TS_API ts_error* ts_stream_same(ts_stream a, ts_stream b, bool* same);
/* the cudaStream_t */
TS_API ts_error* ts_stream_handle(ts_stream stream, uintptr_t* out);
TS_API ts_error* ts_stream_priority(ts_stream stream, int32_t* out);
/* 0 and, for example, -3 */
TS_API ts_error* ts_stream_priority_range(int32_t* least, int32_t* greatest);
/* Both are INVALID_ARGUMENT, and do no harm to the capture, while the stream is captured. */
TS_API ts_error* ts_stream_query(ts_stream stream, bool* done);
/* blocks the thread */
TS_API ts_error* ts_stream_synchronize(ts_stream stream);

/* The calling thread's current stream of the device. device TS_DEVICE_CURRENT (-2) asks for the
 * calling thread's current device. */
#define TS_DEVICE_CURRENT (-2)
TS_API ts_error* ts_get_current_cuda_stream(int32_t device, ts_stream* out);
/* Makes the stream current for its device on the calling OS thread, and nothing else: other
 * devices, other threads and the current device stay. */
TS_API ts_error* ts_set_cuda_stream(ts_stream stream);
/* Work enqueued on `waiter` from now on starts after everything enqueued on `on` so far. The host
 * does not block. Any two devices. */
TS_API ts_error* ts_wait_cuda_stream(ts_stream waiter, ts_stream on);

/* Fork: work enqueued on each of `to` from now on starts after everything enqueued on `from` so
 * far; one record for all. Join: work enqueued on `into` from now on starts after everything
 * enqueued on each of `from` so far. The arrays have count streams, borrowed for the call, of any
 * devices; one that is the other side's own stream is passed over. The host does not block. While a
 * CUDA graph captures `from` of a fork, the forked streams join the capture; that a captured stream
 * waits for one that is not is CAPTURE, here and in ts_wait_cuda_stream. */
TS_API ts_error* ts_stream_fork(ts_stream from, const ts_stream* to, int32_t count);
TS_API ts_error* ts_stream_join(ts_stream into, const ts_stream* from, int32_t count);

/* Thread-local stream guard: enter makes the stream and its device current; exit restores both.
 * Guards nest, and are left in reverse order on the thread that entered them: otherwise exit
 * returns TS_ERROR_WRONG_THREAD or TS_ERROR_OUT_OF_ORDER and changes nothing. A value; nothing to
 * free. */
typedef struct ts_stream_guard {
  uint64_t thread; /* which thread entered, and */
  uint64_t serial; /* its how manieth guard it was */
} ts_stream_guard;
TS_API ts_error* ts_stream_guard_enter(ts_stream stream, ts_stream_guard* out);
TS_API ts_error* ts_stream_guard_exit(ts_stream_guard guard);

/* ---- events ---------------------------------------------------------------------------------- */

/* An event may be used by any number of threads at once. Which record a wait is for is the
 * program's to order: it is the latest one enqueued before the wait. */
typedef struct ts_event ts_event;

enum {
  TS_EVENT_TIMING = 1,      /* can be given to ts_event_elapsed */
  TS_EVENT_BLOCKING = 2,    /* ts_event_synchronize sleeps instead of spinning */
  TS_EVENT_INTERPROCESS = 4 /* can be given to ts_event_export; not with TS_EVENT_TIMING */
};

/* new reference, free with ts_event_free. The CUDA event is made by the first record, on that
 * stream's device; later records must be on the same one. */
TS_API ts_error* ts_event_new(int32_t flags, ts_event** out);
/* takes ownership; work that waits for it already goes on waiting */
TS_API void ts_event_free(ts_event* event);
/* Between processes: export writes a handle (TS_EVENT_HANDLE_BYTES bytes, borrowed for the call)
 * that another process of the machine gives to ts_event_import, as long as this event is not freed.
 * Both may record it and wait for it. Since a record of the other process cannot be seen, such an
 * event counts as recorded: a wait for one that was not is no error and orders nothing. device:
 * that of the records, the same GPU on both sides (its index may differ). */
#define TS_EVENT_HANDLE_BYTES 64
TS_API ts_error* ts_event_export(ts_event* event, int32_t device, uint8_t* handle);
/* new reference, free with ts_event_free; not in the process that exported it */
TS_API ts_error* ts_event_import(int32_t device, const uint8_t* handle, ts_event** out);
TS_API ts_error* ts_event_record(ts_event* event, ts_stream stream);
/* Work enqueued on the stream from now on starts after the event's latest record. The host does not
 * block. TS_ERROR_NOT_RECORDED if there is none; TS_ERROR_CAPTURE if one of stream and record is in
 * the capture under way and the other cannot be, or the record was in one that has ended. */
TS_API ts_error* ts_stream_wait_event(ts_stream stream, ts_event* event);
/* NOT_RECORDED as above; CAPTURE if the latest record is part of a graph */
TS_API ts_error* ts_event_query(ts_event* event, bool* done);
/* blocks; NOT_RECORDED and CAPTURE as above */
TS_API ts_error* ts_event_synchronize(ts_event* event);
/* Both with TS_EVENT_TIMING and recorded, else NOT_RECORDED; both complete and of one device, else
 * INVALID_ARGUMENT. */
TS_API ts_error* ts_event_elapsed(ts_event* start, ts_event* end, float* milliseconds);

/* ---- notices: the host hears that a stream has come to a point --------------------------------
 */

/* A queue of tokens beside a file descriptor. A driver thread puts the tokens there and runs
 * nothing else; who waits is woken through the descriptor, as for a socket. Any number of threads.
 * Needs no GPU by itself. */
typedef struct ts_notifier ts_notifier;
/* new reference, free with ts_notifier_free */
TS_API ts_error* ts_notifier_new(ts_notifier** out);
/* An eventfd, non-blocking, readable when tokens have come since it was read; borrowed until the
 * notifier is freed. Read it (8 bytes), then call ts_notifier_take until it gives fewer tokens than
 * it could. */
TS_API int32_t ts_notifier_fd(const ts_notifier* notifier);
/* Takes up to `capacity` tokens, in the order in which they came, into tokens (borrowed for the
 * call); *count is set to how many, 0 if there are none. Does not block. */
TS_API ts_error* ts_notifier_take(ts_notifier* notifier, uint64_t* tokens, int32_t capacity,
                                  int32_t* count);
/* Puts a token at once, as a stream's notice does. */
TS_API ts_error* ts_notifier_post(ts_notifier* notifier, uint64_t token);
/* takes ownership; notices under way are dropped when they come */
TS_API void ts_notifier_free(ts_notifier* notifier);
/* Puts the token when everything enqueued on the stream so far is done. Later work of the stream
 * waits for the microsecond that this takes. INVALID_ARGUMENT while the stream is captured. After a
 * failure of the device the token may never come: look at ts_stream_query. The host does not
 * block. */
TS_API ts_error* ts_stream_notify(ts_stream stream, ts_notifier* notifier, uint64_t token);

/* ---- ranges: what the program does, named for profilers ----------------------------------------
 */

/* NVTX ranges (nvtxRangeStartEx, nvtxRangeEnd): a range may end on another thread than it began on,
 * and ranges need not nest. Needs no GPU. */

/* Whether anybody listens: not 0 if an NVTX tool is attached or ranges are logged for a trace.
 * Changes while the program runs; read atomically; never freed. With nobody listening the calls
 * below do nothing. */
TS_API const int32_t* ts_range_listeners(void);
/* name: NUL-terminated, borrowed for the call. *out: to be given to ts_range_end once; 0 if nobody
 * listens. */
TS_API ts_error* ts_range_start(const char* name, uint64_t* out);
/* 0 is nothing. INVALID_ARGUMENT for a range that ended already. */
TS_API ts_error* ts_range_end(uint64_t range);
/* a point in time */
TS_API ts_error* ts_range_mark(const char* name);

/* ---- pinned host memory ---------------------------------------------------------------------- */

/* Page-locked memory of exactly the size asked for (rounded up to a page), zeroed, usable for
 * asynchronous copies from any device. */
typedef struct ts_pinned ts_pinned;
/* new reference, free with ts_pinned_free; blocks for milliseconds */
TS_API ts_error* ts_pinned_new(size_t bytes, ts_pinned** out);
/* Pins memory that is there: `bytes` bytes from data on, borrowed until ts_pinned_free, which
 * unpins and does not free it. Not memory of the Go heap. INVALID_ARGUMENT if a part of it is
 * pinned already. new reference; blocks for milliseconds. */
TS_API ts_error* ts_pinned_register(uint8_t* data, size_t bytes, ts_pinned** out);
/* borrowed until the buffer is freed */
TS_API uint8_t* ts_pinned_data(const ts_pinned* pinned);
TS_API size_t ts_pinned_size(const ts_pinned* pinned);
/* Takes ownership, whatever it returns. Looks at no event (the driver may wait for the device): the
 * caller has seen to it that no copy from or to the memory is in flight, and no graph with one is
 * replayed any more. */
TS_API ts_error* ts_pinned_free(ts_pinned* pinned);
TS_API int64_t ts_pinned_bytes_live(void); /* in all buffers not yet freed */

/* ---- tensors --------------------------------------------------------------------------------- */

/* A reference to a LibTorch tensor. Freeing is allowed on any thread and never blocks: device
 * memory goes back to the allocator in the order of the stream it was allocated on. */
typedef struct ts_tensor ts_tensor;

/* LibTorch's c10::ScalarType. */
enum {
  TS_UINT8 = 0,
  TS_INT8 = 1,
  TS_INT16 = 2,
  TS_INT32 = 3,
  TS_INT64 = 4,
  TS_FLOAT16 = 5,
  TS_FLOAT32 = 6,
  TS_FLOAT64 = 7,
  TS_BOOL = 11,
  TS_BFLOAT16 = 15
};

/* LibTorch's c10::MemoryFormat. */
enum { TS_CONTIGUOUS = 0, TS_CHANNELS_LAST = 2 };

/* Uninitialised. sizes: ndim values, borrowed for the call. new reference, free with
 * ts_tensor_free. */
TS_API ts_error* ts_tensor_empty(const int64_t* sizes, int32_t ndim, int32_t dtype, int32_t device,
                                 int32_t memory_format, ts_tensor** out);
/* A CPU tensor that holds a copy. data: `bytes` bytes, borrowed for the call; bytes must be what
 * sizes and dtype need. new reference. */
TS_API ts_error* ts_tensor_from_data(const uint8_t* data, size_t bytes, const int64_t* sizes,
                                     int32_t ndim, int32_t dtype, ts_tensor** out);
/* A CPU tensor over memory that is not copied: contiguous, starting at data, which is borrowed
 * until the tensor and everything that shares its storage is freed. Never Go memory. If the memory
 * is pinned, copies from it are asynchronous. new reference. */
TS_API ts_error* ts_tensor_from_memory(uint8_t* data, size_t bytes, const int64_t* sizes,
                                       int32_t ndim, int32_t dtype, ts_tensor** out);
/* new reference to the same tensor */
TS_API ts_error* ts_tensor_retain(const ts_tensor* tensor, ts_tensor** out);
/* takes ownership */
TS_API void ts_tensor_free(ts_tensor* tensor);
/* takes ownership of each; the array is borrowed for the call */
TS_API void ts_tensor_free_all(ts_tensor* const* tensors, int64_t count);
/* references not yet freed, in the process */
TS_API int64_t ts_tensor_count(void);

typedef struct ts_tensor_info {
  int64_t numel;
  int64_t bytes; /* numel * element size; INT64_MAX if that is more */
  int32_t ndim;
  int32_t dtype;
  int32_t device;
  int32_t element_size;
  bool contiguous;
  bool channels_last; /* contiguous in that memory format */
  bool requires_grad;
  bool pinned;
} ts_tensor_info;

TS_API ts_error* ts_tensor_describe(const ts_tensor* tensor, ts_tensor_info* out);
/* Sizes and strides in elements: arrays of `capacity` values each, filled up to ndim; either may be
 * NULL. INVALID_ARGUMENT if capacity < ndim. */
TS_API ts_error* ts_tensor_shape(const ts_tensor* tensor, int64_t* sizes, int64_t* strides,
                                 int32_t capacity);
/* Address of the first element (host or device), borrowed until the tensor is freed. */
TS_API ts_error* ts_tensor_data(const ts_tensor* tensor, uintptr_t* out);

/* dst.copy_(src): same or broadcastable shape, any dtype and device. Between host and device it
 * returns when the copy is done; with non_blocking the host does not wait where the hardware allows
 * it (pinned memory, same dtype, contiguous). Between GPUs, or within one, the copy is only
 * enqueued. Not recorded for backward, so a parameter can be filled. */
TS_API ts_error* ts_tensor_copy(ts_tensor* dst, const ts_tensor* src, bool non_blocking);
/* tensor.to(device, dtype): new reference, to the same tensor if there was nothing to do. dtype -1
 * keeps it. */
TS_API ts_error* ts_tensor_to(const ts_tensor* tensor, int32_t device, int32_t dtype,
                              bool non_blocking, ts_tensor** out);
/* Copies the elements, in logical order and contiguous, to host memory of exactly `bytes` bytes
 * (borrowed for the call). Blocks until they are there. */
TS_API ts_error* ts_tensor_read(const ts_tensor* tensor, uint8_t* data, size_t bytes);
/* The only element, converted; blocks until it is computed. INVALID_ARGUMENT unless numel is 1. */
TS_API ts_error* ts_tensor_item(const ts_tensor* tensor, double* out);
TS_API ts_error* ts_tensor_item_int(const ts_tensor* tensor, int64_t* out);
/* Marks the memory as used on the stream: after the last reference is freed it is not handed out
 * again before the stream's work so far is done. Not to be resized until it is freed. */
TS_API ts_error* ts_tensor_record_stream(const ts_tensor* tensor, ts_stream stream);

/* One step of a prefetcher in one call, on `stream`: wait for `after` (NULL: nothing to wait for),
 * dst[i].copy_(src[i], non_blocking) for each of count pairs, record `done` (NULL: nothing to
 * record). Pairs have equal shape and dtype; one or both are on the stream's device, and between
 * host and device the strides are equal and dense; host memory must be pinned: else
 * INVALID_ARGUMENT, and nothing is enqueued. Everything is borrowed for the call; the memory must
 * stay as it is until `done`. */
TS_API ts_error* ts_copy_batch(ts_stream stream, ts_event* after, ts_tensor* const* dst,
                               ts_tensor* const* src, int32_t count, ts_event* done);

/* Copies between GPUs with both streams named: dst[i] (on dst_stream's device) from src[i] (on
 * src_stream's device), for each of count pairs of equal shape and dtype; else INVALID_ARGUMENT,
 * and nothing is enqueued. The copies run on src_stream, after what both streams have enqueued so
 * far; what is enqueued on either from now on starts after them. The host does not block. Strides
 * that differ, or are not dense, need temporary memory. Everything is borrowed for the call; src
 * must stay as it is until the copies are done. The devices may be one. In a capture dst_stream
 * has to take part, and src_stream joins; strides between GPUs have to be equal: else CAPTURE. */
TS_API ts_error* ts_copy_peer(ts_stream dst_stream, ts_tensor* const* dst, ts_stream src_stream,
                              ts_tensor* const* src, int32_t count);

/* dst[n,c,h,w] = (src[n,h,w,c] / 255 - mean[c]) / std[c]: src uint8 [N,H,W,C] contiguous; dst
 * float32, float16 or bfloat16 [N,C,H,W] contiguous or channels_last, on the same device; C from 1
 * to 4. mean, std: C values, borrowed for the call. Computed in float32 as src * scale + offset,
 * the product rounded before the sum, then rounded to dst's type: the same bits on the CPU and the
 * GPU.
 */
TS_API ts_error* ts_images_normalize(ts_tensor* dst, const ts_tensor* src, const float* mean,
                                     const float* std, int32_t channels);

/* ---- operators ------------------------------------------------------------------------------- */

/* An entry of LibTorch's dispatcher. Found once, valid for the life of the process, never freed,
 * usable from any number of threads. */
typedef struct ts_operator ts_operator;
/* name as "aten::add", overload as "Tensor" ("" for none), both NUL-terminated and borrowed for the
 * call. Cached; TS_ERROR_NOT_FOUND if there is none. */
TS_API ts_error* ts_operator_find(const char* name, const char* overload, const ts_operator** out);
/* The schema as text, for example "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1)
 * -> Tensor"; borrowed, never freed. */
TS_API const char* ts_operator_schema(const ts_operator* op);

/* One argument. What value means goes by kind: */
enum {
  TS_ARG_DEFAULT = 0, /* the schema's default; an error if it has none */
  TS_ARG_NONE = 1,    /* an optional that is absent */
  TS_ARG_TENSOR = 2,  /* value: index into tensors */
  TS_ARG_TENSORS = 3, /* Tensor[]: count tensors from index value on; Tensor?[]: NULL is none */
  TS_ARG_INT = 4,     /* int, dtype, layout, memory format, SymInt, and Scalar */
  TS_ARG_DOUBLE = 5,  /* float, and Scalar: the bit pattern of a double */
  TS_ARG_BOOL = 6,    /* 0 or 1; also Scalar */
  TS_ARG_INTS = 7,    /* int[], SymInt[], Scalar[]: count values of ints from index value on */
  TS_ARG_DOUBLES = 8, /* float[], Scalar[]: the same, bit patterns of doubles */
  TS_ARG_BOOLS = 9,   /* bool[], Scalar[]: the same, 0 or 1 */
  TS_ARG_DEVICE = 10, /* Device: value is the device index */
  TS_ARG_STRING = 11  /* str: count bytes of text from offset value on */
};
typedef struct ts_arg {
  int32_t kind;
  int32_t count;
  int64_t value;
} ts_arg;

enum {
  TS_CALL_NO_GRAD = 1 /* run under LibTorch's NoGradGuard: nothing is recorded for backward */
};

/* Calls the operator with args in the schema's order; trailing arguments that are left out take
 * their defaults. Each argument is checked against the schema first (TS_ERROR_INVALID_ARGUMENT
 * names the argument and both types). All arrays are borrowed for the call; ints, text may be NULL
 * when unused. Tensor results go to out in order: new references, free with ts_tensor_free, or NULL
 * for one that the operator left undefined, as some backward operators do; results of other types
 * are dropped. *out_count is set to the number of tensors. INVALID_ARGUMENT, before anything runs,
 * if out_capacity, unless 0, is less than that, or if the operator returns a list, whose length
 * nobody knows before: call ts_operator_call_list. With out_capacity 0 results are dropped
 * (in-place operators). */
TS_API ts_error* ts_operator_call(const ts_operator* op, const ts_arg* args, int32_t arg_count,
                                  ts_tensor* const* tensors, int32_t tensor_count,
                                  const int64_t* ints, int32_t int_count, const char* text,
                                  int32_t text_bytes, int32_t flags, ts_tensor** out,
                                  int32_t out_capacity, int32_t* out_count);

/* The results of an operator, however many. */
typedef struct ts_tensor_list ts_tensor_list;
/* ts_operator_call for any number of results: Tensor[] results flattened. *out: new reference, give
 * it to ts_tensor_list_take or ts_tensor_list_free. */
TS_API ts_error* ts_operator_call_list(const ts_operator* op, const ts_arg* args, int32_t arg_count,
                                       ts_tensor* const* tensors, int32_t tensor_count,
                                       const int64_t* ints, int32_t int_count, const char* text,
                                       int32_t text_bytes, int32_t flags, ts_tensor_list** out,
                                       int32_t* out_count);
/* Moves the references to out, an array of as many as ts_operator_call_list said, and frees the
 * list: takes ownership of it, and gives that of the tensors. */
TS_API void ts_tensor_list_take(ts_tensor_list* list, ts_tensor** out);
/* takes ownership, of the tensors too */
TS_API void ts_tensor_list_free(ts_tensor_list* list);

/* ---- autograd, randomness, threads ----------------------------------------------------------- */

/* Accumulates gradients into the leaves. tensor: a scalar, or gradient (borrowed, may be NULL) has
 * its shape. Blocks for the launch of all backward work, not for the device. Gradients are ordered
 * on the streams that are current at the call. */
TS_API ts_error* ts_tensor_backward(const ts_tensor* tensor, const ts_tensor* gradient,
                                    bool retain_graph);
/* new reference, or NULL if there is no gradient */
TS_API ts_error* ts_tensor_grad(const ts_tensor* tensor, ts_tensor** out);
/* gradient: borrowed; NULL drops it */
TS_API ts_error* ts_tensor_set_grad(ts_tensor* tensor, const ts_tensor* gradient);
/* drops the gradient of each */
TS_API ts_error* ts_tensor_clear_grads(ts_tensor* const* tensors, int64_t count);
TS_API ts_error* ts_tensor_set_requires_grad(ts_tensor* tensor, bool requires_grad);

TS_API ts_error* ts_manual_seed(uint64_t seed); /* every device's default generator */

/* Threads that LibTorch uses inside one operator on the CPU; process-wide. */
TS_API ts_error* ts_set_num_threads(int32_t threads);
TS_API int32_t ts_num_threads(void);
/* How many OS threads alive now have entered LibTorch through a tensor, operator, stream or event
 * call. */
TS_API int64_t ts_thread_count(void);
/* The kernel's id of the calling OS thread; for tests of thread affinity. */
TS_API int64_t ts_thread_id(void);
/* Does nothing; for measuring what a call costs. */
TS_API void ts_noop(void);
/* Runs `rounds` calls of at::add_ and of at::add on a one-element float32 tensor of the device and
 * returns host nanoseconds a call: the C++ peer for benchmarks of the same operator through
 * ts_operator_call. out_of_place_ns: each result freed at once; held_ns: results kept and freed 400
 * at a time. */
TS_API ts_error* ts_bench_add(int32_t device, int32_t rounds, double* in_place_ns,
                              double* out_of_place_ns, double* held_ns);
/* Runs `rounds` copies of `bytes` bytes between two GPUs by plain cudaMemcpyPeerAsync, one after
 * the other with nothing beside them, and returns seconds a copy: what the link can do. */
TS_API ts_error* ts_bench_peer(int32_t dst_device, int32_t src_device, size_t bytes, int32_t rounds,
                               double* seconds);

/* ---- graphs ---------------------------------------------------------------------------------- */

/* A sequence of work on one device that was captured once and is enqueued again by one call.
 *
 * A capture is of one stream, which is current on the thread from begin to end, and of what is
 * forked from it and joined (ts_wait_cuda_stream, events). Operators called meanwhile run nothing:
 * they become nodes of the graph. Other threads and streams go on as always, but for two things:
 * operators that draw random numbers elsewhere get TS_ERROR_BUSY, since the capture has the
 * generators, and ts_device_synchronize and ts_device_empty_cache wait for its end, since CUDA
 * would break it for them. The process makes one capture at a time, and begin waits for its turn.
 *
 * What the captured function makes lies in memory of the graph's own, and is written again by every
 * replay. What it read from outside (operands of operators) is kept alive by the graph, and a
 * replay after such a tensor was given other memory is TS_ERROR_STALE; pinned memory that is copied
 * from is the caller's to keep. */
typedef struct ts_graph ts_graph;
/* Begins to capture the stream, which is the calling thread's current one, not a default stream,
 * and non-blocking. share: NULL, or a captured graph of the device whose memory the new one uses as
 * well; borrowed for the call. Graphs that share memory overwrite each other's results: they are
 * replayed one after the other, whatever the streams. The thread must stay the same until the end,
 * and is CAPTURE if it captures already or is inside a memory pool.
 * new reference, free with ts_graph_free. */
TS_API ts_error* ts_graph_begin(ts_stream stream, const ts_graph* share, ts_graph** out);
/* Ends the capture, on the thread that began it, and makes the graph ready for replay.
 * TS_ERROR_CAPTURE if it was broken, with the call that did it, or if nothing was captured; stream,
 * allocators and generators are then as if there had been no capture. */
TS_API ts_error* ts_graph_end(ts_graph* graph);
/* Enqueues the graph's work on the stream. Random numbers go on where the device's generator is.
 * Any thread, and several at once. */
TS_API ts_error* ts_graph_replay(ts_graph* graph, ts_stream stream);
/* how many kernels, copies and fills the graph has; 0 before its end */
TS_API int64_t ts_graph_nodes(const ts_graph* graph);
/* Takes ownership, but not on failure. Ends a capture that was not ended and throws it away: on the
 * thread that began it, WRONG_THREAD on another. Replays that are enqueued are done as if the graph
 * were there. The memory of tensors that were made in the capture stays until they are freed. */
TS_API ts_error* ts_graph_free(ts_graph* graph);
/* blocks until no capture is under way */
TS_API ts_error* ts_capture_wait(void);
/* Whether the calling thread captures, or its current stream is captured. Calls that would wait for
 * the end of the capture, or break it, are then CAPTURE at once. */
TS_API ts_error* ts_capture_here(bool* here);

/* ---- traces ---------------------------------------------------------------------------------- */

/* A recording of what ran when, made with LibTorch's profiler: operators of all threads, and on a
 * machine with a GPU the CUDA calls of all threads and the work of all devices. One recording at a
 * time in a process. Any thread may start it and any other stop it. */
typedef struct ts_trace ts_trace;

enum {
  TS_TRACE_KERNEL = 1, /* device work: lane is the stream's number */
  TS_TRACE_MEMCPY = 2,
  TS_TRACE_MEMSET = 3,
  TS_TRACE_RUNTIME = 4,  /* a call of the CUDA runtime or driver: lane is the OS thread */
  TS_TRACE_OPERATOR = 5, /* one of LibTorch's operators on the host */
  TS_TRACE_RANGE = 6     /* a named range of the program: lane is the thread that began it */
};
typedef struct ts_trace_event {
  int64_t start_ns; /* Unix time; one clock for the host and all devices */
  int64_t duration_ns;
  int64_t bytes;       /* memcpy and memset; otherwise -1 */
  int64_t correlation; /* the same number: a runtime call and the device work that it enqueued */
  int64_t lane;
  int32_t device; /* TS_DEVICE_CPU for what ran on the host */
  int32_t kind;
  int32_t name; /* index into ts_trace_names */
} ts_trace_event;

/* The lane of the stream's work: a number of the profiler's, unique on the device. */
TS_API ts_error* ts_trace_lane(ts_stream stream, int64_t* out);

enum { TS_TRACE_NO_OPERATORS = 1 /* device work and CUDA calls only; ignored without a GPU */ };

/* INVALID_ARGUMENT if something is being recorded. The first one of a process initialises CUPTI. */
TS_API ts_error* ts_trace_start(int32_t flags);
/* Waits for no device: work that is not done is left out, so synchronize before. new reference,
 * free with ts_trace_free. Events are in no order. */
TS_API ts_error* ts_trace_stop(ts_trace** out);
/* all borrowed until the trace is freed; names are NUL-terminated */
TS_API const ts_trace_event* ts_trace_events(const ts_trace* trace);
TS_API int64_t ts_trace_event_count(const ts_trace* trace);
TS_API const char* const* ts_trace_names(const ts_trace* trace);
TS_API int32_t ts_trace_name_count(const ts_trace* trace);
TS_API void ts_trace_free(ts_trace* trace); /* takes ownership */

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_H_ */
