/* torchstream: LibTorch's streams, events, graphs, memory, tensors and operators as plain C. The
 * library is libtorchstream; its errors come from libtorchstream_image, which it links.
 *
 * The rules at the top of torchstream_image.h hold here. In addition:
 *
 *  - Thread state (current device, current stream, gradient mode, autocast, memory pool) never
 *    survives a call. The exceptions are the calls that exist to change it: ts_set_cuda_stream, and
 * the pairs ts_stream_guard_enter and ts_stream_guard_exit, ts_memory_pool_enter and
 * ts_memory_pool_exit, ts_graph_begin and ts_graph_end (or ts_graph_destroy). Both halves of a pair
 * are called on the same thread.
 *  - Work is enqueued on the calling thread's current stream of the device concerned, unless the
 *    function takes a stream.
 *  - Every symbol exists in every build. On a machine without a usable GPU a call that needs one
 *    returns TS_ERROR_NO_DEVICE.
 *  - A call that the host makes often takes its arguments by value or flat: ts_tensor_info, ts_arg,
 *    ts_arguments and ts_function have no size member and do not grow.
 */
#ifndef TORCHSTREAM_H_
#define TORCHSTREAM_H_

#include "torchstream_image.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version --------------------------------------------------------------------------------- */

/* Changes whenever a signature, a fixed struct or an enumerator of this header changes. A client
 * compares it with ts_abi_version() once at load. */
#define TS_ABI_VERSION 6

/* Returns the TS_ABI_VERSION of the loaded library. */
TS_API int32_t ts_abi_version(void);
/* Returns the version of LibTorch, for example "2.11.0". Static. */
TS_API const char* ts_libtorch_version(void);
/* Returns the version of the CUDA toolkit that the library was built with, for example "13.0"; ""
 * if it was built for a LibTorch without CUDA: then no machine has a usable GPU. Static. */
TS_API const char* ts_cuda_version(void);

/* ---- devices --------------------------------------------------------------------------------- */

/* A device is an index: 0 to count - 1 for a GPU, TS_DEVICE_CPU for the host. TS_DEVICE_CURRENT
 * stands for the calling thread's current GPU where a comment says so. */
#define TS_DEVICE_CPU (-1)
#define TS_DEVICE_CURRENT (-2)

/* Returns the number of GPUs: 0 without a GPU or driver. Cannot fail. */
TS_API int32_t ts_device_count(void);

typedef struct ts_device_info {
  size_t size;    /* sizeof(ts_device_info), set by the caller */
  char name[256]; /* ends with NUL */
  int32_t major;  /* compute capability */
  int32_t minor;
  int32_t multiprocessors;
  int32_t async_engines; /* copy engines */
  size_t total_bytes;
} ts_device_info;

TS_API ts_error* ts_device_get_info(int32_t device, ts_device_info* info);

#define TS_UUID_BYTES 16

typedef struct ts_device_identity {
  size_t size; /* sizeof(ts_device_identity), set by the caller */
  uint8_t uuid[TS_UUID_BYTES];
  char pci_bus_id[32]; /* "0000:1B:00.0"; ends with NUL */
} ts_device_identity;

/* Returns what names the GPU outside of the process, whatever its index is here. */
TS_API ts_error* ts_device_get_identity(int32_t device, ts_device_identity* identity);

/* What the driver measures of a GPU. A value that the GPU does not report is -1. */
typedef struct ts_readings {
  size_t size; /* sizeof(ts_readings), set by the caller */
  int64_t power_milliwatts;
  int64_t power_limit_milliwatts;
  int64_t energy_millijoules; /* since the driver was loaded */
  int32_t temperature;        /* of the GPU's die, in degrees Celsius */
  int32_t sm_clock;           /* MHz, as are all clocks */
  int32_t memory_clock;
  int32_t max_sm_clock;
  int32_t max_memory_clock;
  int32_t busy_percent;        /* of the last sample period, in which a kernel ran */
  int32_t memory_busy_percent; /* in which device memory was read or written */
  int64_t throttle_reasons;    /* NVML's nvmlClocksEventReason values, added */
} ts_readings;

/* Reads the GPU's sensors through the driver's library libnvidia-ml.so.1 (NVML), which the first
 * call loads. TS_ERROR_UNSUPPORTED if the library is missing, or too old: the message says what to
 * install. Needs no CUDA context, and does not wait for the device. */
TS_API ts_error* ts_readings_get(const char* pci_bus_id, ts_readings* readings);

typedef struct ts_device_memory {
  size_t size;                 /* sizeof(ts_device_memory), set by the caller */
  size_t allocated_bytes;      /* in live tensors, by LibTorch's caching allocator */
  size_t peak_allocated_bytes; /* since the start or the last ts_device_reset_peak_memory */
  size_t reserved_bytes;       /* held from the driver by the caching allocator */
  size_t peak_reserved_bytes;
  size_t free_bytes; /* what the driver can still give, to all processes */
  size_t total_bytes;
} ts_device_memory;

TS_API ts_error* ts_device_get_memory(int32_t device, ts_device_memory* memory);
/* Sets the peaks of ts_device_memory to the present values. */
TS_API ts_error* ts_device_reset_peak_memory(int32_t device);
/* Says whether `device` can read and write the memory of `peer` by itself (NVLink, or PCI Express
 * where the machine allows it). If not, copies between the two go through the host. */
TS_API ts_error* ts_device_can_access_peer(int32_t device, int32_t peer, bool* accessible);
/* Blocks until all work enqueued on the device is done. Waits for the end of a capture. */
TS_API ts_error* ts_device_synchronize(int32_t device);

/* ---- LibTorch's caching allocator ------------------------------------------------------------ */

typedef struct ts_allocator_stats {
  size_t size;                /* sizeof(ts_allocator_stats), set by the caller */
  size_t requested_bytes;     /* asked for by live tensors, before rounding up */
  size_t active_bytes;        /* live, or freed while a recorded stream still uses them */
  size_t split_bytes;         /* free parts of segments that are also in use: fragmentation */
  int64_t allocations;        /* live */
  int64_t total_allocations;  /* since the start */
  int64_t segments;           /* held from the driver */
  int64_t driver_allocations; /* calls of cudaMalloc since the start */
  int64_t driver_frees;       /* calls of cudaFree since the start */
  int64_t retries;            /* times the cache was emptied to make room, since the start */
  int64_t out_of_memory;      /* times there was no room even so, since the start */
} ts_allocator_stats;

TS_API ts_error* ts_allocator_get_stats(int32_t device, ts_allocator_stats* stats);
/* Returns the share of ts_allocator_limit; 1 if there is no limit. */
TS_API ts_error* ts_allocator_get_limit(int32_t device, double* fraction);
/* Copies the settings of the latest ts_allocator_configure, or of the environment, with a NUL, to
 * `capacity` bytes. length: of the text, which is cut off if there is less room. */
TS_API ts_error* ts_allocator_get_settings(char* settings, size_t capacity, size_t* length);
/* Changes settings of LibTorch's allocators, in the form of the variable PYTORCH_ALLOC_CONF.
 * Settings that are not named take their defaults. TS_ERROR_OPERATOR for an unknown one. */
TS_API ts_error* ts_allocator_configure(const char* settings);
/* Starts to record allocations and frees of all devices, up to max_entries at a time, or, with 0,
 * ends the recording. Earlier entries are forgotten. */
TS_API ts_error* ts_allocator_record_history(int64_t max_entries);
/* Writes the allocators' segments, and the history, to a file that PyTorch's memory viewer
 * (pytorch.org/memory_viz) opens. Replaces the file. */
TS_API ts_error* ts_allocator_dump(const char* path);
/* Limits what the allocator takes from the driver to a share of the device's memory: over 0, at
 * most 1. */
TS_API ts_error* ts_allocator_limit(int32_t device, double fraction);

typedef struct ts_host_stats {
  size_t size;                /* sizeof(ts_host_stats), set by the caller */
  size_t active_bytes;        /* in live tensors, rounded up to powers of two */
  size_t reserved_bytes;      /* and what is kept for later ones */
  size_t peak_bytes;          /* the maximum of reserved_bytes */
  int64_t allocations;        /* live */
  int64_t driver_allocations; /* calls of cudaHostAlloc since the start */
  int64_t driver_frees;       /* calls of cudaFreeHost since the start */
  int64_t driver_nanoseconds; /* spent in both */
} ts_host_stats;

/* Returns the state of LibTorch's caching allocator of pinned memory, which serves
 * ts_tensor_new_pinned and non_blocking copies to the host, and not ts_pinned. */
TS_API ts_error* ts_host_allocator_get_stats(ts_host_stats* stats);

/* Gives unused reserved memory of every device back to the driver, and pinned memory that LibTorch
 * keeps for its own copies. Waits for the end of a capture. TS_ERROR_BUSY while a thread is inside
 * a memory pool. */
TS_API ts_error* ts_allocator_empty_cache(void);

/* A part of the caching allocator that shares no segment with the rest, so that its end gives whole
 * segments back. Any number of threads may use it, but only one at a time may be inside. */
typedef struct ts_memory_pool ts_memory_pool;

TS_API ts_error* ts_memory_pool_new(int32_t device, ts_memory_pool** pool);
/* Ends a pool. Tensors in it stay valid. Free memory goes back to the driver at once; if a capture
 * is under way or a thread is inside another pool, it goes back when the next pool ends or capture
 * begins. Memory of tensors that are freed later goes back then too, or with
 * ts_allocator_empty_cache. TS_ERROR_INVALID_ARGUMENT while a thread is inside. */
TS_API ts_error* ts_memory_pool_destroy(ts_memory_pool* pool);
/* Enters the pool: until ts_memory_pool_exit the calling thread's allocations on the pool's device
 * come from it. This leaves out what other threads do on its behalf (backward has a thread for each
 * device) and what is captured, which has memory of its own. While a thread is inside, memory that
 * is freed after ts_tensor_record_stream is kept. TS_ERROR_INVALID_ARGUMENT if a thread is inside
 * already, TS_ERROR_CAPTURE if the calling thread takes part in a capture. */
TS_API ts_error* ts_memory_pool_enter(ts_memory_pool* pool);
/* Leaves the pool. TS_ERROR_WRONG_THREAD on another thread than entered. */
TS_API ts_error* ts_memory_pool_exit(ts_memory_pool* pool);
/* Returns the bytes held from the driver, and those in live tensors. Walks all segments of the
 * allocator. */
TS_API ts_error* ts_memory_pool_get_bytes(const ts_memory_pool* pool, size_t* reserved,
                                          size_t* allocated);

/* What a pool's memory is for. */
enum {
  TS_POOL_KIND_DEFAULT = 0, /* everything else */
  TS_POOL_KIND_MEMORY_POOL = 1,
  TS_POOL_KIND_GRAPH = 2, /* shared by the graphs that were captured with the same `share` */
  TS_POOL_KIND_ENDED =
      3 /* of a pool or graph that is gone, held by live tensors or not yet freed */
};

typedef struct ts_pool_stats {
  int64_t id;   /* equal in two calls for the same pool; 0 for the default one */
  int32_t kind; /* TS_POOL_KIND_ */
  int32_t device;
  size_t reserved_bytes;  /* held from the driver */
  size_t allocated_bytes; /* in live tensors */
  size_t requested_bytes; /* asked for by them, before rounding up */
  size_t active_bytes;    /* live, or freed while a recorded stream still uses them */
  size_t max_free_bytes;  /* the largest free part: what fits without the driver */
  int64_t allocations;    /* live */
  int64_t segments;       /* held from the driver */
} ts_pool_stats;

/* Writes the state of up to `capacity` pools of the device's caching allocator, the default one
 * first. count: their number, which may be more. Walks all segments of the allocator. */
TS_API ts_error* ts_allocator_get_pools(int32_t device, ts_pool_stats* pools, int64_t capacity,
                                        int64_t* count);
/* Returns the state of one pool. Walks its segments. */
TS_API ts_error* ts_memory_pool_get_stats(const ts_memory_pool* pool, ts_pool_stats* stats);

/* A queue of the device allocations that failed, with a file descriptor. The thread whose
 * allocation fails adds an entry, and writes a snapshot if one is wanted, without a lock of the
 * allocator and before its call returns the error. No other code runs on that thread. */
typedef struct ts_memory_observer ts_memory_observer;

typedef struct ts_out_of_memory {
  int64_t number; /* from 1 on, by observer. A gap: more entries than the queue has room for */
  int32_t device;
  bool snapshot;          /* the file is written */
  size_t wanted_bytes;    /* rounded up by the allocator */
  size_t free_bytes;      /* what the driver could give, to all processes */
  size_t limit_bytes;     /* the device's memory, or the share of ts_allocator_limit */
  size_t allocated_bytes; /* in live tensors */
  size_t reserved_bytes;  /* held from the driver by the caching allocator */
} ts_out_of_memory;

/* Begins to observe the failures of all devices. snapshot_prefix: NULL, or the beginning of the
 * paths of snapshots (see ts_allocator_dump), which goes on with the entry's number and ".pickle".
 * max_snapshots: how many to write. Files that exist are not replaced. */
TS_API ts_error* ts_memory_observer_new(const char* snapshot_prefix, int64_t max_snapshots,
                                        ts_memory_observer** observer);
/* Ends the observer. A failure under way may still write its snapshot. */
TS_API void ts_memory_observer_free(ts_memory_observer* observer);
/* Returns an eventfd, as ts_notifier_fd does. */
TS_API int32_t ts_memory_observer_fd(const ts_memory_observer* observer);
/* Takes up to `capacity` entries in the order of the failures. count: how many. Does not block. */
TS_API ts_error* ts_memory_observer_take(ts_memory_observer* observer, ts_out_of_memory* entries,
                                         int64_t capacity, int64_t* count);

/* ---- streams --------------------------------------------------------------------------------- */

/* A stream is a value, LibTorch's packed form: comparable, copied freely, never freed. id 0 is the
 * device's default stream. Any number of threads may use a stream at once. Only values made by
 * functions of this group are valid. */
typedef struct ts_stream {
  int64_t id;
  int32_t device;
} ts_stream;

/* Returns the next stream of LibTorch's pool, which has 32 for each device and priority, hands them
 * out in turn and never destroys them: the 33rd request gets the 1st stream again. Pool streams are
 * not ordered against the default stream. priority: 0 is normal, negative values down to
 * ts_stream_get_priority_range's greatest are more urgent. */
TS_API ts_error* ts_stream_from_pool(int32_t device, int32_t priority, ts_stream* stream);
/* Wraps a cudaStream_t made elsewhere. It is borrowed until the last tensor that used the stream is
 * freed; its maker destroys it after that. Handle 0 is the default stream. cudaStreamLegacy and
 * cudaStreamPerThread are refused, since LibTorch cannot name them. */
TS_API ts_error* ts_stream_from_handle(uintptr_t cuda_stream, int32_t device, ts_stream* stream);
/* Ends the use of a wrapped stream, before its maker destroys it. From then on the value is
 * TS_ERROR_INVALID_ARGUMENT everywhere, until the address is wrapped again. */
TS_API ts_error* ts_stream_forget(ts_stream stream);
/* Lends a stream that nobody else gets, otherwise like one of the pool, without a limit to their
 * number. ts_stream_release gives it back. */
TS_API ts_error* ts_stream_acquire(int32_t device, int32_t priority, ts_stream* stream);
/* ts_stream_acquire, for a stream whose kernels run on at most so many of the device's
 * multiprocessors, 1 or more. All streams of a device with the same number share them, and other
 * streams may use them too. *multiprocessors is the number, which the driver's granularity rounds
 * down (8 on compute capability 9.0), or 0 if the device has no more than the maximum: the stream
 * is then not bounded. Copies are not bounded. TS_ERROR_INVALID_ARGUMENT for fewer than the
 * driver's minimum, TS_ERROR_UNSUPPORTED with a driver before CUDA 12.5. */
TS_API ts_error* ts_stream_acquire_bounded(int32_t device, int32_t priority,
                                           int32_t max_multiprocessors, ts_stream* stream,
                                           int32_t* multiprocessors);
/* Takes back a stream of ts_stream_acquire or ts_stream_acquire_bounded, without waiting. From then
 * on the value is TS_ERROR_INVALID_ARGUMENT. It must not be current on any thread. The CUDA stream
 * lives on, because LibTorch remembers streams beyond their use (memory marked as used on one,
 * backward of what ran on one): ts_stream_acquire hands it out again once its work is done. */
TS_API ts_error* ts_stream_release(ts_stream stream);
/* Returns the device's default stream. */
TS_API ts_error* ts_stream_get_default(int32_t device, ts_stream* stream);
/* Says whether two values are one queue: equal values, or two values for one CUDA stream. */
TS_API ts_error* ts_stream_is_same(ts_stream a, ts_stream b, bool* same);
/* Returns the cudaStream_t. */
TS_API ts_error* ts_stream_get_handle(ts_stream stream, uintptr_t* cuda_stream);
TS_API ts_error* ts_stream_get_priority(ts_stream stream, int32_t* priority);
/* Returns 0 and the most urgent priority, for example -3. */
TS_API ts_error* ts_stream_get_priority_range(int32_t* least, int32_t* greatest);
/* Says whether work that is enqueued on the stream is captured, by any thread. */
TS_API ts_error* ts_stream_is_capturing(ts_stream stream, bool* capturing);
/* Says whether all work enqueued on the stream is done. TS_ERROR_CAPTURE, without harm to the
 * capture, while the stream is captured, and on a thread that captures. */
TS_API ts_error* ts_stream_query(ts_stream stream, bool* done);
/* Blocks until all work enqueued on the stream is done. Fails as ts_stream_query. */
TS_API ts_error* ts_stream_synchronize(ts_stream stream);
/* Enqueues a kernel that keeps the stream busy for at least the time, 0 to 60 s: for tests of the
 * order between streams. May be captured. */
TS_API ts_error* ts_stream_delay(ts_stream stream, int64_t nanoseconds);

/* Returns the calling thread's current stream of the device, which may be TS_DEVICE_CURRENT. */
TS_API ts_error* ts_get_current_cuda_stream(int32_t device, ts_stream* stream);
/* Makes the stream current for its device on the calling OS thread. Other devices, other threads
 * and the current device stay as they are. */
TS_API ts_error* ts_set_cuda_stream(ts_stream stream);
/* Starts work enqueued on `waiter` from now on after everything enqueued on `on` so far. The host
 * does not block. The devices may differ. TS_ERROR_CAPTURE if `waiter` is captured and `on` is
 * not. */
TS_API ts_error* ts_wait_cuda_stream(ts_stream waiter, ts_stream on);

/* Starts work enqueued on each of the `count` streams `to` from now on after everything enqueued on
 * `from` so far, with one record for all. Streams may be of any device; `from` itself is passed
 * over in `to`. The host does not block. While a graph captures `from`, the forked streams join the
 * capture. TS_ERROR_CAPTURE if one of `to` is captured and `from` is not. */
TS_API ts_error* ts_stream_fork(ts_stream from, const ts_stream* to, int64_t count);
/* Starts work enqueued on `into` from now on after everything enqueued on each of the `count`
 * streams `from` so far. Otherwise as ts_stream_fork. */
TS_API ts_error* ts_stream_join(ts_stream into, const ts_stream* from, int64_t count);

/* A thread-local stream guard, a value. Guards nest and are exited in reverse order. */
typedef struct ts_stream_guard {
  uint64_t thread; /* the library's number of the thread that entered */
  uint64_t serial; /* the guard's ordinal on that thread */
} ts_stream_guard;

/* Makes the stream and its device current on the calling thread. */
TS_API ts_error* ts_stream_guard_enter(ts_stream stream, ts_stream_guard* guard);
/* Restores the stream and the device that were current at enter. Changes nothing and returns
 * TS_ERROR_WRONG_THREAD on another thread, TS_ERROR_OUT_OF_ORDER before an inner guard's exit or
 * after its own. */
TS_API ts_error* ts_stream_guard_exit(ts_stream_guard guard);

/* ---- events ---------------------------------------------------------------------------------- */

/* Any number of threads may use an event at once. A wait is for the latest record that was enqueued
 * before it; the program orders the two. */
typedef struct ts_event ts_event;

enum {
  TS_EVENT_FLAG_TIMING = 1,       /* for ts_event_get_elapsed */
  TS_EVENT_FLAG_BLOCKING = 2,     /* ts_event_synchronize sleeps instead of spinning */
  TS_EVENT_FLAG_INTERPROCESS = 4, /* for ts_event_export; excludes TS_EVENT_FLAG_TIMING */
  /* A captured record or wait becomes a node of the graph instead of an edge: each replay records
   * the event, or waits for its latest record, as an enqueued call does. So other work can wait for
   * a point inside a replay, and a replay for other work, and two records take the time between two
   * points. The event counts as recorded from the first replay on. A wait needs an earlier record
   * outside of the capture. */
  TS_EVENT_FLAG_EXTERNAL = 8
};

/* Makes an event. Its first record makes the CUDA event, on that stream's device; later records
 * must be on the same device. flags: TS_EVENT_FLAG_ values, added. */
TS_API ts_error* ts_event_new(int32_t flags, ts_event** event);
/* Frees an event. Work that waits for it already goes on waiting. */
TS_API void ts_event_free(ts_event* event);
TS_API ts_error* ts_event_record(ts_event* event, ts_stream stream);
/* Starts work enqueued on the stream from now on after the event's latest record. The host does not
 * block. TS_ERROR_NOT_RECORDED if there is no record. TS_ERROR_CAPTURE if either the stream or the
 * record belongs to the capture under way and the other cannot join it, or if the record was part
 * of a capture that has ended. */
TS_API ts_error* ts_stream_wait_event(ts_stream stream, const ts_event* event);
/* Returns the device of the event's records and its cudaEvent_t, borrowed until the event is freed.
 * TS_ERROR_NOT_RECORDED before the first record, which makes it. */
TS_API ts_error* ts_event_get_handle(const ts_event* event, int32_t* device, uintptr_t* cuda_event);
/* Says whether the latest record is complete. TS_ERROR_NOT_RECORDED if there is none,
 * TS_ERROR_CAPTURE if it is part of a graph. */
TS_API ts_error* ts_event_query(const ts_event* event, bool* done);
/* Blocks until the latest record is complete. Fails as ts_event_query. */
TS_API ts_error* ts_event_synchronize(const ts_event* event);
/* Returns the time between two records on the device, with CUDA's resolution of about half a
 * microsecond. TS_ERROR_INVALID_ARGUMENT unless both have TS_EVENT_FLAG_TIMING, are complete and of
 * one device; TS_ERROR_NOT_RECORDED unless both have a record. */
TS_API ts_error* ts_event_get_elapsed(const ts_event* start, const ts_event* end,
                                      int64_t* nanoseconds);

/* Size of the handle of an event that processes share. */
#define TS_EVENT_HANDLE_BYTES 64
/* Writes a handle of TS_EVENT_HANDLE_BYTES bytes, which another process of the machine gives to
 * ts_event_import while this event lives. Both processes may record the event and wait for it.
 * Since the other process's records cannot be seen, such an event counts as recorded: waiting for
 * it before any record is no error and orders nothing. device: the GPU of the records, the same one
 * in both processes, whatever its index there. */
TS_API ts_error* ts_event_export(ts_event* event, int32_t device, uint8_t* handle);
/* Makes an event from a handle of another process. */
TS_API ts_error* ts_event_import(int32_t device, const uint8_t* handle, ts_event** event);

/* ---- notices: the host learns that a stream has reached a point ------------------------------ */

/* A queue of tokens with a file descriptor. A driver thread puts tokens into it and runs nothing
 * else; a waiter is woken through the descriptor, as for a socket. Any number of threads may use it
 * at once. Needs no GPU by itself. */
typedef struct ts_notifier ts_notifier;

TS_API ts_error* ts_notifier_new(ts_notifier** notifier);
/* Frees a notifier. Notices under way are dropped on arrival. */
TS_API void ts_notifier_free(ts_notifier* notifier);
/* Returns an eventfd, non-blocking, borrowed until the notifier is freed. It is readable when
 * tokens have arrived since it was last read. Read its 8 bytes, then call ts_notifier_take until it
 * returns fewer tokens than its capacity. */
TS_API int32_t ts_notifier_fd(const ts_notifier* notifier);
/* Takes up to `capacity` tokens in order of arrival. count: how many, 0 if there are none. Does not
 * block. */
TS_API ts_error* ts_notifier_take(ts_notifier* notifier, uint64_t* tokens, int64_t capacity,
                                  int64_t* count);
/* Puts a token at once, as a stream's notice does. */
TS_API ts_error* ts_notifier_post(ts_notifier* notifier, uint64_t token);
/* Puts the token once everything enqueued on the stream so far is done. Later work of the stream
 * waits about a microsecond for it. The host does not block. TS_ERROR_CAPTURE while the stream is
 * captured. After a failure of the device the token may never come: ts_stream_query
 * tells.
 */
TS_API ts_error* ts_stream_notify(ts_stream stream, ts_notifier* notifier, uint64_t token);

/* ---- ranges: parts of the program, named for profilers --------------------------------------- */

/* NVTX ranges (nvtxRangeStartEx, nvtxRangeEnd). A range may end on another thread than it began on,
 * and ranges need not nest. Needs no GPU. */

/* Returns a counter, valid for the life of the process, that is not 0 while an NVTX tool is
 * attached or a trace logs ranges. It changes while the program runs: read it atomically. While it
 * is 0 the functions below do nothing. */
TS_API const int32_t* ts_range_listeners(void);
/* Begins a range. range: for exactly one ts_range_end; 0 if nobody listens. */
TS_API ts_error* ts_range_start(const char* name, uint64_t* range);
/* Ends a range; 0 is accepted. TS_ERROR_INVALID_ARGUMENT for a range that has ended. */
TS_API ts_error* ts_range_end(uint64_t range);
/* Marks a point in time. */
TS_API ts_error* ts_range_mark(const char* name);

/* ---- pinned host memory ---------------------------------------------------------------------- */

/* Page-locked memory for asynchronous copies from and to any device. */
typedef struct ts_pinned ts_pinned;

/* Allocates exactly `bytes` bytes (rounded up to a page), zeroed. Blocks for milliseconds. */
TS_API ts_error* ts_pinned_new(size_t bytes, ts_pinned** pinned);
/* Pins existing memory: `bytes` bytes from data on, borrowed until ts_pinned_destroy, which unpins
 * and does not free it. The memory must not move. TS_ERROR_INVALID_ARGUMENT if part of it is pinned
 * already. Blocks for milliseconds. */
TS_API ts_error* ts_pinned_register(uint8_t* data, size_t bytes, ts_pinned** pinned);
/* Frees or unpins the memory. Checks no event, and the driver may wait for the device. The caller
 * has made sure that no copy from or to the memory is in flight, and that no graph with such a copy
 * is replayed again. */
TS_API ts_error* ts_pinned_destroy(ts_pinned* pinned);
/* Returns the memory, borrowed until ts_pinned_destroy. */
TS_API uint8_t* ts_pinned_data(const ts_pinned* pinned);
TS_API size_t ts_pinned_size(const ts_pinned* pinned);
/* Returns the bytes of all pinned memory that is not yet destroyed. */
TS_API size_t ts_pinned_live_bytes(void);

/* ---- tensors --------------------------------------------------------------------------------- */

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
TS_API ts_error* ts_tensor_new(const int64_t* sizes, int64_t ndim, int32_t dtype, int32_t device,
                               int32_t memory_format, ts_tensor** tensor);
/* Makes an uninitialised CPU tensor in pinned memory of LibTorch's caching allocator, which keeps
 * freed memory for the next tensor of its size (rounded up to a power of two). The memory is not
 * handed out again before copies that this library enqueued from or to it are done. */
TS_API ts_error* ts_tensor_new_pinned(const int64_t* sizes, int64_t ndim, int32_t dtype,
                                      int32_t memory_format, ts_tensor** tensor);
/* Makes a CPU tensor with a copy of the data. bytes must be what sizes and dtype need. */
TS_API ts_error* ts_tensor_from_data(const uint8_t* data, size_t bytes, const int64_t* sizes,
                                     int64_t ndim, int32_t dtype, ts_tensor** tensor);
/* Makes a contiguous CPU tensor over existing memory, without a copy. data: borrowed until the
 * tensor and everything that shares its storage is freed; it must not move. If the memory is
 * pinned, copies from it are asynchronous. */
TS_API ts_error* ts_tensor_from_memory(uint8_t* data, size_t bytes, const int64_t* sizes,
                                       int64_t ndim, int32_t dtype, ts_tensor** tensor);
/* Makes a CPU tensor with these strides, in elements, over existing memory, without a copy. data:
 * `bytes` bytes that contain every element; borrowed until the tensor and everything that shares
 * its storage is freed, and then given back by ts_borrowed_take, with the token. */
TS_API ts_error* ts_tensor_borrow(uint8_t* data, size_t bytes, const int64_t* sizes,
                                  const int64_t* strides, int64_t ndim, int32_t dtype,
                                  int64_t token, ts_tensor** tensor);
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
TS_API ts_error* ts_tensor_get_kinds(ts_tensor* const* tensors, int64_t count, int32_t* devices,
                                     int32_t* dtypes);
/* Returns sizes and strides in elements, in arrays of `capacity` values each, filled up to ndim;
 * either may be NULL. TS_ERROR_INVALID_ARGUMENT if capacity < ndim. */
TS_API ts_error* ts_tensor_get_shape(const ts_tensor* tensor, int64_t* sizes, int64_t* strides,
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
TS_API ts_error* ts_tensor_to(const ts_tensor* tensor, int32_t device, int32_t dtype,
                              bool non_blocking, ts_tensor** result);
/* Casts `count` tensors to dtype, TS_DTYPE_BFLOAT16 or TS_DTYPE_FLOAT16, as autocast does with the
 * weights of one operator, but in a few kernels for all tensors, and with one graph node for those
 * that require grad: the node casts their gradients back to float32 when all of them are computed.
 * casts: count new references, NULL for a tensor that is not float32. */
TS_API ts_error* ts_tensor_cast_all(ts_tensor* const* tensors, int64_t count, int32_t dtype,
                                    ts_tensor** casts);
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
TS_API ts_error* ts_tensor_copy_batch(ts_stream stream, const ts_event* after,
                                      ts_tensor* const* dst, ts_tensor* const* src, int64_t count,
                                      ts_event* done);

/* Copies between GPUs with both streams named: dst[i], on dst_stream's device, from src[i], on
 * src_stream's device, for each of `count` pairs of equal shape and dtype. Otherwise
 * TS_ERROR_INVALID_ARGUMENT, and nothing is enqueued. The copies run on src_stream, after
 * everything enqueued on either stream so far; work enqueued on either from now on starts after
 * them. The host does not block. Strides that differ, or are not dense, need temporary memory. src
 * must stay as it is until the copies are done. The devices may be the same. In a capture
 * dst_stream must take part, src_stream joins, and strides between GPUs must be equal: otherwise
 * TS_ERROR_CAPTURE. */
TS_API ts_error* ts_tensor_copy_peer(ts_stream dst_stream, ts_tensor* const* dst,
                                     ts_stream src_stream, ts_tensor* const* src, int64_t count);

/* Computes dst[n,c,h,w] = (src[n,h,w,c] / 255 - mean[c]) / std[c]. src: uint8 [N,H,W,C],
 * contiguous. dst: float32, float16 or bfloat16 [N,C,H,W], contiguous or channels_last, on the same
 * device. mean, std: one value for each of 1 to 4 channels. Computed in float32 as src * scale +
 * offset with the product rounded before the sum, then rounded to dst's type: the same bits on the
 * CPU and the GPU. */
TS_API ts_error* ts_tensor_normalize_images(ts_tensor* dst, const ts_tensor* src, const float* mean,
                                            const float* std, int64_t channels);

/* Does aten::batch_norm in training, adds `residual`, and computes ReLU, in two kernels, with two
 * more in backward. `tensors` has 6: x, weight, bias, running_mean, running_var and residual, of
 * which each but x may be NULL; the running statistics are changed in place. flags: as for
 * ts_operator_call; autocast and switches change nothing. result: a new reference, or NULL for
 * tensors that the kernels do not take: then nothing has happened, and operators compute the same.
 * The kernels take an x on a GPU, float32, float16 or bfloat16 [N,C,H,W], channels_last, with C *
 * element size a multiple of 16 bytes and more than one value for each channel; a residual like x;
 * and float32 [C] on the same GPU. With equal statistics the values have the bits of the operators,
 * rounded between them; the statistics' sums have another order. Gradients of gradients are those
 * of operators. */
TS_API ts_error* ts_tensor_batch_norm_relu(ts_tensor* const* tensors, double momentum, double eps,
                                           int32_t flags, ts_tensor** result);

/* ---- tensors of other libraries: DLPack -------------------------------------------------------
 */

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
TS_API ts_error* ts_dlpack_export(const ts_tensor* tensor, ts_stream stream, int32_t flags,
                                  struct DLManagedTensor** managed);
TS_API ts_error* ts_dlpack_export_versioned(const ts_tensor* tensor, ts_stream stream,
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
TS_API ts_error* ts_dlpack_import(struct DLManagedTensor* managed, ts_stream stream, int32_t flags,
                                  ts_tensor** tensor);
TS_API ts_error* ts_dlpack_import_versioned(struct DLManagedTensorVersioned* managed,
                                            ts_stream stream, int32_t flags, ts_tensor** tensor);
/* Calls the deleter of a struct that no library has taken. */
TS_API void ts_dlpack_free(struct DLManagedTensor* managed);
TS_API void ts_dlpack_free_versioned(struct DLManagedTensorVersioned* managed);

/* ---- tensors of other processes ---------------------------------------------------------------
 */

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
TS_API ts_error* ts_ipc_open(int32_t device, const uint8_t* handle, size_t offset,
                             const int64_t* sizes, const int64_t* strides, int64_t ndim,
                             int32_t dtype, int32_t lock, ts_tensor** tensor);
/* Makes a contiguous CPU tensor over a shared mapping of a file, from `offset` on, a multiple of
 * the page size. file: a descriptor, taken over if the call succeeds; a thread of the library
 * unmaps and closes it when the last tensor that shares the memory has gone. The file must not
 * shrink. */
TS_API ts_error* ts_tensor_map(int32_t file, size_t offset, const int64_t* sizes, int64_t ndim,
                               int32_t dtype, ts_tensor** tensor);

/* Where the elements of a tensor lie, and the stream that an operator on it would run on: for a
 * stream sanitizer. The elements are in `rows` rows of row_bytes bytes; rows begin pitch bytes
 * apart. Elements that do not lie so are described as one row, from the first to the last. */
#define TS_EXTENT_SIZES 6
typedef struct ts_tensor_extent {
  uintptr_t storage; /* first byte of the memory that views share; 0 if there is none */
  size_t storage_bytes;
  uintptr_t begin;
  size_t row_bytes; /* 0 for a tensor without elements */
  int64_t rows;
  size_t pitch;
  ts_stream stream; /* the calling thread's current stream of the device; unset on the CPU */
  int32_t device;
  int32_t dtype;
  int32_t ndim;
  int64_t sizes[TS_EXTENT_SIZES]; /* the first of ndim */
} ts_tensor_extent;

/* Fills in `count` extents. A NULL among the tensors gets one without memory. */
TS_API ts_error* ts_tensor_get_extents(ts_tensor* const* tensors, int64_t count,
                                       ts_tensor_extent* extents);

/* ---- operators ------------------------------------------------------------------------------- */

/* An entry of LibTorch's dispatcher, valid for the life of the process. Any number of threads may
 * use it at once. */
typedef struct ts_operator ts_operator;

/* Finds an operator: name as "aten::add", overload as "Tensor" ("" for none). Cached.
 * TS_ERROR_NOT_FOUND if there is none. */
TS_API ts_error* ts_operator_find(const char* name, const char* overload, const ts_operator** op);
/* Returns the schema, for example "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1)
 * -> Tensor". Valid for the life of the process. */
TS_API const char* ts_operator_schema(const ts_operator* op);

/* What an argument's value means. */
enum {
  TS_ARG_KIND_DEFAULT = 0, /* the schema's default; an error if it has none */
  TS_ARG_KIND_NONE = 1,    /* an optional that is absent */
  TS_ARG_KIND_TENSOR = 2,  /* index into tensors */
  TS_ARG_KIND_TENSORS = 3, /* Tensor[]: count tensors from this index on; Tensor?[]: NULL is none */
  TS_ARG_KIND_INT = 4,     /* int, dtype, layout, memory format, SymInt, and Scalar */
  TS_ARG_KIND_DOUBLE = 5,  /* float, and Scalar: the bit pattern of a double */
  TS_ARG_KIND_BOOL = 6,    /* 0 or 1; also Scalar */
  TS_ARG_KIND_INTS = 7,    /* int[], SymInt[], Scalar[]: count values of ints from this index on */
  TS_ARG_KIND_DOUBLES = 8, /* float[], Scalar[]: the same, bit patterns of doubles */
  TS_ARG_KIND_BOOLS = 9,   /* bool[], Scalar[]: the same, 0 or 1 */
  TS_ARG_KIND_DEVICE = 10, /* Device: the device index */
  TS_ARG_KIND_STRING = 11, /* str: count bytes of text from this offset on */
  TS_ARG_KIND_COMPLEX = 12,  /* Scalar: bit patterns of two doubles in ints, from this index on */
  TS_ARG_KIND_GENERATOR = 13 /* Generator: the address of a ts_generator, borrowed for the call */
};

/* One argument. The narrow count keeps it at 16 bytes. */
typedef struct ts_arg {
  int32_t kind; /* TS_ARG_KIND_ */
  int32_t count;
  int64_t value;
} ts_arg;

/* The arguments of a call but its tensors, passed by value: a call costs no more than with flat
 * parameters. ints and text may be NULL when no argument refers to them. */
typedef struct ts_arguments {
  const ts_arg* args; /* in the schema's order; the rest take their defaults */
  int64_t arg_count;
  const int64_t* ints;
  int64_t int_count;
  const char* text;
  size_t text_bytes;
} ts_arguments;

enum {
  TS_OPERATOR_FLAG_NO_GRAD = 1, /* under LibTorch's NoGradGuard: nothing is recorded for backward */
  /* Under LibTorch's autocast, with this lower precision, for operands on the CPU and on a GPU. The
   * cache of cast weights is off: its entries would outlive an update of the weight, and no call
   * knows where a forward pass ends. The two exclude each other. */
  TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16 = 2,
  TS_OPERATOR_FLAG_AUTOCAST_FLOAT16 = 4
};

/* LibTorch's switches between speed, precision and reproducibility. */
enum {
  TS_NUMERICS_FLAG_MATMUL_TF32 = 1,      /* float32 products on a GPU may round to TF32 */
  TS_NUMERICS_FLAG_CONVOLUTION_TF32 = 2, /* so may float32 convolutions; LibTorch's default */
  TS_NUMERICS_FLAG_BENCHMARK = 4,        /* cuDNN measures its algorithms for each new shape */
  TS_NUMERICS_FLAG_DETERMINISTIC = 8     /* operators without a deterministic kernel fail */
};

/* A call's own switches, instead of those of the process, in the flags of the calls of operators,
 * ts_tensor_backward, ts_tensor_grads and ts_autograd_callback: TS_NUMERICS_ON times those that are
 * on, and TS_NUMERICS_OFF times the others. Of all flags of several operands, added by "or", none
 * or each of the four is either on or off: otherwise TS_ERROR_INVALID_ARGUMENT.
 *
 * LibTorch keeps one value of each switch for the process. So the call waits until all operators
 * and nodes of backward passes under other switches have ended on the host, and others wait for it;
 * those under equal switches run at the same time. No call waits so for a callback
 * (ts_autograd_callback), which may wait for any thread. The switches are those of the kernels that
 * a call enqueues, and so of the replays of a graph that it is captured into. */
enum { TS_NUMERICS_ON = 16, TS_NUMERICS_OFF = 256 };

/* Calls the operator. Each argument is checked against the schema first: TS_ERROR_INVALID_ARGUMENT
 * names the argument and both types. flags: TS_OPERATOR_FLAG_ values and own switches
 * (TS_NUMERICS_ON), added.
 *
 * results: the tensors, in order; NULL for one that the operator leaves undefined, as some backward
 * operators do. Results of other types are dropped. count: the number of tensors.
 * TS_ERROR_INVALID_ARGUMENT, before anything runs, if capacity is less than that, or if the
 * operator returns a list or an optional tensor, whose number is unknown (ts_operator_call_list).
 * Capacity 0 drops all results, as for in-place operators. */
TS_API ts_error* ts_operator_call(const ts_operator* op, ts_arguments arguments,
                                  ts_tensor* const* tensors, int64_t tensor_count, int32_t flags,
                                  ts_tensor** results, int64_t capacity, int64_t* count);

/* How many elements the arrays of ts_operator_call_one have, and its flags. */
typedef struct ts_call_counts {
  uint16_t flags; /* as for ts_operator_call */
  uint8_t args;
  uint8_t tensors;
  uint32_t ints;
} ts_call_counts;

/* Does ts_operator_call for arguments without text and for at most one result, which NULL drops.
 * All parameters fit into registers, and the depth of the calls is one less, so a call of a small
 * operator costs less. */
TS_API ts_error* ts_operator_call_one(const ts_operator* op, const ts_arg* args,
                                      ts_tensor* const* tensors, const int64_t* ints,
                                      ts_call_counts counts, ts_tensor** result);

/* The results of an operator, however many. */
typedef struct ts_tensor_list ts_tensor_list;

/* Does ts_operator_call for any number of results; Tensor[] results are flattened. count: their
 * number. Not more than capacity are written to results, and list becomes NULL. More are in list,
 * which ends with ts_tensor_list_take or ts_tensor_list_free, and results is untouched. */
TS_API ts_error* ts_operator_call_list(const ts_operator* op, ts_arguments arguments,
                                       ts_tensor* const* tensors, int64_t tensor_count,
                                       int32_t flags, ts_tensor** results, int64_t capacity,
                                       ts_tensor_list** list, int64_t* count);
/* Moves the references to an array of as many tensors as ts_operator_call_list counted, and frees
 * the list. Takes ownership of the list and gives that of the tensors. */
TS_API void ts_tensor_list_take(ts_tensor_list* list, ts_tensor** tensors);
/* Frees the list and its tensors. */
TS_API void ts_tensor_list_free(ts_tensor_list* list);

/* The results of an operator, of any type. */
typedef struct ts_results ts_results;

/* The sizes of the arrays that ts_results_take fills. */
typedef struct ts_results_size {
  int64_t args;
  int64_t tensors;
  int64_t ints;
} ts_results_size;

/* Does ts_operator_call for an operator whose results are tensors, lists of them, ints, floats,
 * bools and Scalars, or absent. TS_ERROR_INVALID_ARGUMENT, before anything runs, if it has another.
 * Blocks until numbers are computed. results: ends with ts_results_take or ts_results_free. */
TS_API ts_error* ts_operator_call_results(const ts_operator* op, ts_arguments arguments,
                                          ts_tensor* const* tensors, int64_t tensor_count,
                                          int32_t flags, ts_results** results,
                                          ts_results_size* size);
/* Moves the results to arrays of these sizes, in the notation of arguments, and frees the rest.
 * Takes ownership of the results and gives that of the tensors, NULL for one that is undefined. A
 * dtype is an int. */
TS_API void ts_results_take(ts_results* results, ts_arg* args, ts_tensor** tensors, int64_t* ints);
/* Frees the results and their tensors. */
TS_API void ts_results_free(ts_results* results);

/* ---- autograd, randomness, threads ----------------------------------------------------------- */

/* Accumulates gradients into the leaves. Without a gradient (NULL) the tensor must be a scalar;
 * otherwise the gradient has its shape. Blocks for the launch of all backward work, not for the
 * device. Gradients are ordered on the streams that are current at the call. The error of a
 * callback (ts_autograd_callback) is this call's. TS_ERROR_INVALID_ARGUMENT in an accumulation hook
 * (ts_tensor_add_accumulation_hook), which holds the lock that the call may need. flags: 0 or
 * TS_GRAD_FLAG_RETAIN_GRAPH, and the pass's own switches (TS_NUMERICS_ON), under which each node of
 * the graph runs, whatever those of its forward were. */
TS_API ts_error* ts_tensor_backward(const ts_tensor* tensor, const ts_tensor* gradient,
                                    int32_t flags);
enum {
  TS_GRAD_FLAG_RETAIN_GRAPH = 1, /* keep the data of backward for another call */
  TS_GRAD_FLAG_CREATE_GRAPH = 2, /* record the computation of the gradients; implies retaining */
  TS_GRAD_FLAG_ALLOW_UNUSED = 4, /* NULL for an input that no output depends on, not an error */
  /* While a graph is captured: does not call the hooks of leaves, for gradients that the replays
   * give to a pass that calls them. */
  TS_GRAD_FLAG_NO_LEAF_HOOKS = 8
};

/* Computes the gradients of the outputs with respect to the inputs, which need not be leaves, and
 * accumulates nothing. output_gradients: NULL, or one for each output, NULL for a scalar.
 * gradients: input_count new references. flags: TS_GRAD_FLAG_ values, and the pass's own switches
 * (TS_NUMERICS_ON), added. Otherwise as ts_tensor_backward, but for accumulation hooks, in which
 * this call is possible. */
TS_API ts_error* ts_tensor_grads(ts_tensor* const* outputs, ts_tensor* const* output_gradients,
                                 int64_t output_count, ts_tensor* const* inputs,
                                 int64_t input_count, int32_t flags, ts_tensor** gradients);
/* Returns the gradient, NULL if there is none. */
TS_API ts_error* ts_tensor_get_grad(const ts_tensor* tensor, ts_tensor** gradient);
/* Returns the gradients of `count` tensors, NULL for a tensor that has none. */
TS_API ts_error* ts_tensor_get_grads(ts_tensor* const* tensors, int64_t count,
                                     ts_tensor** gradients);
/* Sets the gradient, which the tensor then shares; NULL drops it. */
TS_API ts_error* ts_tensor_set_grad(ts_tensor* tensor, const ts_tensor* gradient);
/* Drops the gradients of `count` tensors. */
TS_API ts_error* ts_tensor_clear_grads(ts_tensor* const* tensors, int64_t count);
TS_API ts_error* ts_tensor_set_requires_grad(ts_tensor* tensor, bool requires_grad);
/* Makes graphs that are recorded from now on add to the gradients of `count` leaves with nodes of
 * their own. Otherwise a leaf has one such node as long as any graph uses it, and that node runs on
 * the stream on which it was first used, also for graphs of other streams, and of captures.
 * TS_ERROR_CAPTURE, before any effect, if such a node has hooks, as those of c10d's own reducer
 * are: they would not be called any more. Hooks of the leaf itself stay, and do not count. */
TS_API ts_error* ts_tensor_forget_accumulators(ts_tensor* const* leaves, int64_t count);
/* TS_ERROR_INVALID_ARGUMENT, with its shape, if a leaf that requires grad, other than these, gets a
 * gradient in a backward pass from the outputs. */
TS_API ts_error* ts_tensor_check_leaves(ts_tensor* const* outputs, int64_t output_count,
                                        ts_tensor* const* leaves, int64_t leaf_count);

enum {
  TS_CALLBACK_FLAG_CREATE_GRAPH = 1 /* the pass records the computation of the gradients */
};

/* A function of the caller that a backward pass calls.
 *
 * context: the caller's number. tensors: borrowed for the call; NULL for a gradient that is
 * undefined, which counts as zeros. results: NULL at first; the function may write new references,
 * which the library takes ownership of. flags: TS_CALLBACK_FLAG_ values, and the pass's own
 * switches (TS_NUMERICS_ON), added. Returns NULL, or an error that the library takes ownership of;
 * the backward pass ends with its code and message, and results are dropped.
 *
 * Threads: for tensors on the CPU it runs on the thread that called ts_tensor_backward or
 * ts_tensor_grads, inside of that call; for tensors on a GPU on LibTorch's thread of that device,
 * while the other waits. The current stream of the device is the one on which the forward operation
 * ran. Any function of this header may be called, backward included, on the same thread. The
 * gradient mode is on: an operator that is not to be recorded has TS_OPERATOR_FLAG_NO_GRAD.
 * Autocast is off.
 *
 * A context that a call took over comes back through ts_callbacks_take when nothing can call the
 * function with it any more: the hook was removed, or the tensor or graph node has ended. After an
 * error of the call that should take it over, the context is the caller's at once. */
typedef ts_error* (*ts_autograd_callback)(int64_t context, int32_t flags, ts_tensor* const* tensors,
                                          int64_t count, ts_tensor** results, int64_t result_count);

/* The means to remove a hook. */
typedef struct ts_hook ts_hook;

/* Calls back with the tensor's gradient in every backward pass that computes it, before it is used
 * or accumulated. The callback's one result, if there is one, takes the gradient's place: it has
 * its shape, dtype and device. A tensor that is changed in place later keeps the hook on the
 * gradient of its values before. The tensor requires grad. Not beside a backward pass that uses the
 * tensor. hook: ends with ts_hook_free. */
TS_API ts_error* ts_tensor_add_gradient_hook(const ts_tensor* tensor, ts_autograd_callback callback,
                                             int64_t context, ts_hook** hook);
/* Calls back with a leaf after each backward pass has added to its gradient (ts_tensor_get_grad),
 * without results. ts_tensor_grads adds to none. Otherwise as ts_tensor_add_gradient_hook. */
TS_API ts_error* ts_tensor_add_accumulation_hook(const ts_tensor* tensor,
                                                 ts_autograd_callback callback, int64_t context,
                                                 ts_hook** hook);
/* Removes the hook. A call of it that is under way ends as usual. Any thread may remove it, any
 * number of times. */
TS_API void ts_hook_remove(ts_hook* hook);
/* Frees the handle. A hook that was not removed stays. */
TS_API void ts_hook_free(ts_hook* hook);

/* Calls back, without tensors, at the end of the backward pass in whose callback this function is
 * called. All gradients are then accumulated and ordered on the streams that were current at the
 * call of ts_tensor_backward, which are current again. A pass that fails does not call.
 * TS_ERROR_INVALID_ARGUMENT outside of a callback. */
TS_API ts_error* ts_backward_add_callback(ts_autograd_callback callback, int64_t context);

/* A function of the caller, after its forward: what its outputs are computed from, and how to
 * compute the gradients. */
typedef struct ts_function {
  const char* name;         /* for messages; copied */
  ts_tensor* const* inputs; /* as the following tensors borrowed for the call */
  int64_t input_count;
  /* Computed from the inputs, with TS_OPERATOR_FLAG_NO_GRAD. One may be an input, or a view of one,
   * but none may be an input that forward has changed in place. */
  ts_tensor* const* outputs;
  int64_t output_count;
  const bool* constant;    /* for each output whether it has no gradient; or NULL */
  ts_tensor* const* saved; /* that backward needs: inputs, outputs or others */
  int64_t saved_count;
  /* Gets the gradient of each output (zeros where nothing used the output, NULL where it is
   * constant), and then the saved tensors. Its results are the gradients of the inputs, NULL for
   * zeros; that of an input that requires no grad is dropped. After TS_CALLBACK_FLAG_CREATE_GRAPH
   * its operators are to be recorded. */
  ts_autograd_callback backward;
  int64_t context;
} ts_function;

/* Makes a graph node of the function: the results are the outputs with the node as their history.
 * At least one input requires grad. A backward pass that has freed the saved tensors, and one that
 * finds them changed in place, fails. results: output_count new references. The context goes over
 * to the node. */
TS_API ts_error* ts_function_attach(ts_function function, ts_tensor** results);

/* Returns how many callbacks the calling thread is in. */
TS_API int32_t ts_callback_depth(void);
/* Writes contexts that nothing uses any more, and returns their number. LibTorch frees graphs on
 * any thread, where no code of the caller may run. */
TS_API int64_t ts_callbacks_take(int64_t* contexts, int64_t capacity);

/* Seeds every device's default generator. With a GPU TS_ERROR_CAPTURE in a capture, and
 * TS_ERROR_BUSY beside one; no generator is then seeded. */
TS_API ts_error* ts_random_seed(uint64_t seed);
/* Returns the state of the device's default generator: new bytes on the CPU, which PyTorch's
 * get_rng_state returns too. Replays of a graph count. For a GPU, TS_ERROR_CAPTURE in a capture,
 * and TS_ERROR_BUSY beside one. */
TS_API ts_error* ts_random_get_state(int32_t device, ts_tensor** state);
/* Replaces the state of the device's default generator. The bytes are copied. Fails as
 * ts_random_get_state. */
TS_API ts_error* ts_random_set_state(int32_t device, const ts_tensor* state);

/* A generator of random numbers on one device, for TS_ARG_KIND_GENERATOR. An operator locks it
 * while it draws. Any number of threads may use it at once. A capture whose operators draw from
 * generators keeps them: each replay draws the numbers that follow. The functions that read or set
 * one of a GPU are TS_ERROR_CAPTURE in a capture, and TS_ERROR_BUSY beside one. */
typedef struct ts_generator ts_generator;

/* Makes a generator with a seed. */
TS_API ts_error* ts_generator_new(int32_t device, uint64_t seed, ts_generator** generator);
/* Returns a handle to the device's default generator, which operators use without an argument. */
TS_API ts_error* ts_generator_new_default(int32_t device, ts_generator** generator);
TS_API void ts_generator_free(ts_generator* generator);
TS_API ts_error* ts_generator_get_seed(const ts_generator* generator, uint64_t* seed);
/* Sets the seed, and the offset to 0. */
TS_API ts_error* ts_generator_set_seed(ts_generator* generator, uint64_t seed);
/* Returns how many numbers each thread of a kernel has drawn since the seed. TS_ERROR_OPERATOR on
 * the CPU, whose generator has no offset. */
TS_API ts_error* ts_generator_get_offset(const ts_generator* generator, uint64_t* offset);
/* Sets the offset, a multiple of 4. */
TS_API ts_error* ts_generator_set_offset(ts_generator* generator, uint64_t offset);
/* Returns the state, as ts_random_get_state does for a default generator. */
TS_API ts_error* ts_generator_get_state(const ts_generator* generator, ts_tensor** state);
TS_API ts_error* ts_generator_set_state(ts_generator* generator, const ts_tensor* state);

/* Replaces the process's switches, which calls without their own find. flags: TS_NUMERICS_FLAG_
 * values, added. An operator that runs on another thread meanwhile sees the old or the new ones.
 * Waits as an operator does for those under other switches. */
TS_API ts_error* ts_numerics_set(int32_t flags);
/* Returns the process's switches. */
TS_API ts_error* ts_numerics_get(int32_t* flags);

/* Sets how many threads LibTorch uses inside one operator on the CPU, in the whole process. */
TS_API ts_error* ts_parallelism_set(int32_t threads);
/* Returns how many threads LibTorch uses inside one operator on the CPU. */
TS_API int32_t ts_parallelism(void);
/* Returns the number of living OS threads that have entered LibTorch through a tensor, operator,
 * stream or event call. */
TS_API int64_t ts_thread_count(void);
/* Returns the number of OS threads that hold handles of cuBLAS, cuDNN and cuSOLVER: at most 20, as
 * operators of other threads run on some of these. Threads of backward (one for each device) are
 * not counted. */
TS_API int64_t ts_library_thread_count(void);
/* Returns the kernel's id of the calling OS thread, for tests of thread affinity. */
TS_API int64_t ts_thread_id(void);

/* ---- graphs ---------------------------------------------------------------------------------- */

/* A sequence of work on one device that is captured once and then enqueued by one call. Any number
 * of threads may replay a graph at once.
 *
 * A capture takes one stream, which is current on the thread from begin to end, and every stream
 * that is forked from it and joined (ts_stream_fork, ts_wait_cuda_stream, events). Operators called
 * meanwhile run nothing: they become nodes of the graph. Other threads and streams go on, with two
 * exceptions. Operators elsewhere that draw random numbers get TS_ERROR_BUSY, since the capture
 * owns the generators. ts_device_synchronize and ts_allocator_empty_cache wait for the capture's
 * end, since CUDA would break the capture for them. The process makes one capture at a time;
 * ts_graph_begin waits for its turn.
 *
 * Memory that the captured function allocates belongs to the graph, and every replay overwrites it.
 * The graph keeps tensors from outside (operands of operators) alive, and a replay is
 * TS_ERROR_STALE after one of them got other memory. Pinned memory that is copied from is the
 * caller's to keep. */
typedef struct ts_graph ts_graph;

/* Begins to capture the stream: the calling thread's current one, non-blocking, and not a default
 * stream. share: NULL, or a captured graph of the device whose memory the new one uses too. Graphs
 * that share memory overwrite each other's results, and their replays run one after the other on
 * any streams. TS_ERROR_CAPTURE if the thread captures already or is inside a memory pool. */
TS_API ts_error* ts_graph_begin(ts_stream stream, const ts_graph* share, ts_graph** graph);
/* Ends the capture and makes the graph ready for replay. TS_ERROR_CAPTURE, with the name of the
 * call at fault, if the capture was broken or nothing was captured; stream, allocators and
 * generators are then as if there had been no capture. TS_ERROR_WRONG_THREAD on another thread than
 * began it. */
TS_API ts_error* ts_graph_end(ts_graph* graph);
/* Enqueues the graph's work on the stream. Random numbers continue from the device's generator. */
TS_API ts_error* ts_graph_replay(ts_graph* graph, ts_stream stream);
/* Returns the number of nodes; 0 before the capture's end. */
TS_API int64_t ts_graph_node_count(const ts_graph* graph);

typedef struct ts_graph_nodes {
  size_t size; /* sizeof(ts_graph_nodes), set by the caller */
  int64_t kernels;
  int64_t copies;
  int64_t fills;
  int64_t host_functions;
  int64_t event_records; /* of events with TS_EVENT_FLAG_EXTERNAL */
  int64_t event_waits;
  int64_t empty; /* joins of several edges */
  int64_t others;
} ts_graph_nodes;

/* Returns the number of nodes by kind. */
TS_API ts_error* ts_graph_get_nodes(const ts_graph* graph, ts_graph_nodes* nodes);
/* Keeps the cudaGraph_t, which the capture's end otherwise frees, for ts_graph_dump. Called between
 * ts_graph_begin and ts_graph_end. */
TS_API ts_error* ts_graph_keep_for_dump(ts_graph* graph);
/* Writes the nodes and edges to a file, in the language of Graphviz. verbose: with the parameters
 * of every node. TS_ERROR_INVALID_ARGUMENT without ts_graph_keep_for_dump. */
TS_API ts_error* ts_graph_dump(const ts_graph* graph, const char* path, bool verbose);
/* Returns the cudaGraphExec_t, and the cudaGraph_t or 0 without ts_graph_keep_for_dump, borrowed
 * until the graph is destroyed. */
TS_API ts_error* ts_graph_get_handles(const ts_graph* graph, uintptr_t* cuda_graph_exec,
                                      uintptr_t* cuda_graph);
/* Ends a graph. Discards a capture that has not ended: TS_ERROR_WRONG_THREAD on another thread than
 * began it. Replays that are enqueued complete as if the graph lived. Memory of tensors that were
 * made in the capture stays until they are freed. */
TS_API ts_error* ts_graph_destroy(ts_graph* graph);

/* Blocks until no capture is under way. */
TS_API ts_error* ts_capture_wait(void);
/* Says whether the calling thread captures, or its current stream is captured. Calls that would
 * wait for the capture's end, or break it, then return TS_ERROR_CAPTURE at once. */
TS_API ts_error* ts_capture_is_active(bool* active);

/* ---- collectives of several processes -------------------------------------------------------- */

/* A table of keys and values that the processes of a job share: LibTorch's TCPStore, or one inside
 * of the process. Any number of threads may use it at once. */
typedef struct ts_store ts_store;

/* Connects with the store at host:port. serve: also runs the server, which ends with the store;
 * port 0 then stands for a free port. Keys are put behind `prefix` and a slash, unless it is empty.
 * Blocks until the server answers, for the timeout at most, which also bounds ts_store_get. */
TS_API ts_error* ts_store_connect(const char* host, int32_t port, bool serve, const char* prefix,
                                  int64_t timeout_nanoseconds, ts_store** store);
/* Makes a store inside of the process. */
TS_API ts_error* ts_store_new_local(int64_t timeout_nanoseconds, ts_store** store);
/* Frees a store. Groups that were made with it keep what they need of it. */
TS_API void ts_store_free(ts_store* store);
TS_API ts_error* ts_store_set(ts_store* store, const char* key, const uint8_t* data, size_t bytes);
/* Copies the value of the key, and blocks until there is one. bytes: its size.
 * TS_ERROR_INVALID_ARGUMENT if it is larger than the capacity. */
TS_API ts_error* ts_store_get(ts_store* store, const char* key, uint8_t* data, size_t capacity,
                              size_t* bytes);

/* One rank's part in a group of `size` ranks, each a process with one device: Gloo for the CPU,
 * NCCL for a GPU. All ranks of a group call the same functions in the same order. One thread at a
 * time calls those that launch.
 *
 * A group of GPUs runs a collective on the stream that the call names, in the stream's order; work
 * must be NULL. The first error, of NCCL or because a collective did not end within the group's
 * timeout, aborts what is under way: kernels that wait for other ranks end, their results are
 * undefined, and every later collective fails.
 *
 * A group of CPUs runs a collective on threads of Gloo, which write the result until ts_work_wait
 * returns. `stream` is ignored. */
typedef struct ts_group ts_group;
typedef struct ts_work ts_work;

/* Connects with the other ranks of the group, and blocks until all have called. name: unique in the
 * store. ranks: `size` ranks of the members in the whole job. device: a GPU, or TS_DEVICE_CPU.
 * timeout: of a collective. TS_ERROR_UNSUPPORTED for a GPU if LibTorch has no NCCL. */
TS_API ts_error* ts_group_new(ts_store* store, const char* name, int32_t rank, int32_t size,
                              const int32_t* ranks, int32_t device, int64_t timeout_nanoseconds,
                              ts_group** group);
/* Ends the use of a group in order: waits for its work on GPUs. All ranks call it. */
TS_API ts_error* ts_group_shutdown(ts_group* group);
/* Ends what is under way, from any thread: kernels of NCCL stop, connections of Gloo are closed.
 * Collectives under way and later ones fail here, and on the other ranks once they notice. */
TS_API ts_error* ts_group_abort(ts_group* group);
/* Frees a group. Waits for Gloo's threads, which give up a collective after the group's timeout. */
TS_API void ts_group_free(ts_group* group);

enum { TS_GROUP_FAULT_NONE = 0, TS_GROUP_FAULT_TIMEOUT = 1, TS_GROUP_FAULT_COMMUNICATION = 2 };

/* Says whether NCCL has failed, or a collective on the GPU has not ended in time. Does not block.
 * fault: a TS_GROUP_FAULT_; always TS_GROUP_FAULT_NONE for the CPU, whose work returns its error.
 */
TS_API ts_error* ts_group_get_fault(ts_group* group, int32_t* fault);

enum {
  TS_REDUCTION_SUM = 0,
  TS_REDUCTION_AVERAGE = 1, /* of floating point numbers */
  TS_REDUCTION_PRODUCT = 2,
  TS_REDUCTION_MIN = 3,
  TS_REDUCTION_MAX = 4
};

/* Collectives. Tensors are contiguous (but see ts_group_broadcast), on the group's device, and
 * borrowed for the call; the work keeps what it needs of them. work: NULL for a group of GPUs,
 * otherwise new, freed with ts_work_free. */

/* Overwrites the tensor of every rank with that of the rank `root`. Like that of an all-reduce, the
 * tensor may have its dimensions in any order in memory, the same on all ranks, without gaps. */
TS_API ts_error* ts_group_broadcast(ts_group* group, ts_stream stream, ts_tensor* tensor,
                                    int32_t root, ts_work** work);
/* Overwrites the tensor of every rank with the reduction of all. */
TS_API ts_error* ts_group_all_reduce(ts_group* group, ts_stream stream, ts_tensor* tensor,
                                     int32_t reduction, ts_work** work);
/* Reduces the inputs and writes part r of the result, of `size` equal ones, to the output of rank
 * r. The input has `size` times the elements of the output. */
TS_API ts_error* ts_group_reduce_scatter(ts_group* group, ts_stream stream, ts_tensor* output,
                                         const ts_tensor* input, int32_t reduction, ts_work** work);
/* Writes the inputs of all ranks, in the order of ranks, to every output. */
TS_API ts_error* ts_group_all_gather(ts_group* group, ts_stream stream, ts_tensor* output,
                                     const ts_tensor* input, ts_work** work);
/* Sends part r of the input to rank r, and writes what the ranks send here, in the order of ranks,
 * to the output. output_rows, input_rows: `size` numbers of rows, or both NULL for equal parts. */
TS_API ts_error* ts_group_all_to_all(ts_group* group, ts_stream stream, ts_tensor* output,
                                     const ts_tensor* input, const int64_t* output_rows,
                                     const int64_t* input_rows, ts_work** work);
/* Sends the tensor to a rank, which receives one of the same size and dtype. The timeout is the
 * CPU's; on a GPU the group's holds. */
TS_API ts_error* ts_group_send(ts_group* group, ts_stream stream, const ts_tensor* tensor,
                               int32_t to, int64_t timeout_nanoseconds, ts_work** work);
TS_API ts_error* ts_group_receive(ts_group* group, ts_stream stream, ts_tensor* tensor,
                                  int32_t from, int64_t timeout_nanoseconds, ts_work** work);

/* Blocks until the work is done. TS_ERROR_OPERATOR if it failed or was aborted. */
TS_API ts_error* ts_work_wait(ts_work* work);
/* Makes ts_work_wait fail at once, on all threads that are in it. What Gloo's threads still do goes
 * on until the group's timeout. */
TS_API ts_error* ts_work_abort(ts_work* work);
TS_API void ts_work_free(ts_work* work);

/* Averages gradients over a group of ranks while backward computes them. Gradients are copied into
 * flat buckets; a bucket is reduced as soon as it and those before it are full, on the reducer's
 * stream or on Gloo's threads, beside the rest of backward. Afterwards the gradients are views of
 * the buckets, unless those have another dtype. All ranks have equal parameters and buckets. One
 * thread at a time calls the functions, but for ts_reducer_abort. */
typedef struct ts_reducer ts_reducer;

/* Makes a reducer without buckets, and adds a hook to each parameter until it is freed. group:
 * borrowed until then. stream: of a group of GPUs, on which buckets are reduced; used by nothing
 * else. parameters: leaves that require grad, on the group's device. dtype: of the buckets, or -1
 * for that of the parameters. */
TS_API ts_error* ts_reducer_new(ts_group* group, ts_stream stream, ts_tensor* const* parameters,
                                int64_t count, int32_t dtype, ts_reducer** reducer);
TS_API void ts_reducer_free(ts_reducer* reducer);
/* Makes the buckets, in the order in which they are reduced. order: the indices of all parameters.
 * Bucket b has those from ends[b - 1], or 0, to ends[b] - 1, which have one dtype. Gradients that
 * are views of earlier buckets stay what they are. TS_ERROR_CAPTURE in a capture. */
TS_API ts_error* ts_reducer_arrange(ts_reducer* reducer, const int64_t* order, const int64_t* ends,
                                    int64_t bucket_count);
/* Begins to reduce the gradients of the backward that follows. A backward without it accumulates
 * gradients on this rank alone. */
TS_API ts_error* ts_reducer_begin(ts_reducer* reducer);
/* Reduces what backward has left, with zeros for parameters without a gradient, and waits for all:
 * the calling thread on the CPU, otherwise its current stream. unused: for each parameter whether
 * this rank had no gradient. After an error ts_reducer_cancel must follow. */
TS_API ts_error* ts_reducer_join(ts_reducer* reducer, bool* unused);
/* Ends what ts_reducer_begin began, after an error. Reductions under way go on. On the CPU the
 * parameters of their buckets have no gradient afterwards, as it would change, and
 * ts_reducer_begin returns TS_ERROR_INVALID_ARGUMENT until they are done, at the latest after the
 * group's timeout. On a GPU they go on writing to gradients, on the reducer's stream: the caller
 * orders its own stream after that one before it uses or changes them, also by another backward. */
TS_API ts_error* ts_reducer_cancel(ts_reducer* reducer);
/* Makes a ts_reducer_join that waits, or will wait, fail, from any thread. */
TS_API ts_error* ts_reducer_abort(ts_reducer* reducer);
/* Returns the parameters in the order in which the last backward made their gradients. order: room
 * for all. count: how many had one. */
TS_API ts_error* ts_reducer_get_order(ts_reducer* reducer, int64_t* order, int64_t* count);

/* ---- sanitizer: what LibTorch does by itself about memory and order -------------------------- */

#define TS_SANITIZER_ALLOCATED 1           /* address, bytes, stream */
#define TS_SANITIZER_FREED 2               /* address, bytes, stream */
#define TS_SANITIZER_UNMAPPED 3            /* address, bytes: returned to the driver */
#define TS_SANITIZER_EVENT_RECORDED 4      /* address, stream */
#define TS_SANITIZER_EVENT_AWAITED 5       /* address, stream: the stream waits for the event */
#define TS_SANITIZER_EVENT_DELETED 6       /* address */
#define TS_SANITIZER_STREAM_SYNCHRONIZED 7 /* stream: the host has waited */
#define TS_SANITIZER_EVENT_SYNCHRONIZED 8  /* address */
#define TS_SANITIZER_DEVICE_SYNCHRONIZED 9
#define TS_SANITIZER_READ 10    /* address, bytes, stream */
#define TS_SANITIZER_WRITTEN 11 /* address, bytes, stream */
#define TS_SANITIZER_USED 12    /* address, stream: as of ts_tensor_record_stream */

typedef struct ts_sanitizer_entry {
  int32_t kind; /* TS_SANITIZER_ */
  int32_t device;
  uintptr_t address; /* of memory, or the cudaEvent_t */
  uintptr_t stream;  /* cudaStream_t; 0 is the device's default stream */
  size_t bytes;
  bool of_call; /* made inside of a call of the thread that takes it */
} ts_sanitizer_entry;

/* Begins to log. Before, LibTorch calls nothing of this library; afterwards it does for ever, which
 * costs an atomic load for each entry while nothing is logged. Without a GPU there is nothing to
 * log. */
TS_API ts_error* ts_sanitizer_start(void);
/* Stops logging and drops what is logged. */
TS_API void ts_sanitizer_stop(void);
/* Moves up to `capacity` of the oldest entries into `entries` and returns their number. First come
 * those of all threads, in the order in which they happened: allocations, frees, and all that
 * backward passes do outside of their hooks, on whatever threads. Then come the events, waits and
 * synchronisations of the calling thread's calls (of_call). Cannot fail. */
TS_API int64_t ts_sanitizer_take(ts_sanitizer_entry* entries, int64_t capacity);

/* ---- decoding JPEGs on a GPU ----------------------------------------------------------------- */

/* Decodes crops of JPEGs on a GPU from their entry points, as ts_image_decode_with_entries does on
 * the host: the pixels are the same, byte for byte. ts_image_plan_segments plans an image into
 * memory that travels to the device.
 *
 * A decoder holds device memory, allocated by ts_gpu_decoder_new and by no other call. Its runs
 * share that memory, so they are on one stream, or on streams that are ordered. One thread uses a
 * decoder at a time.
 *
 * A decoder of TS_DEVICE_CPU runs the same arithmetic on the calling thread, image by image, and
 * its runs return when they are done: for tests on machines without a GPU. It is slower than
 * ts_image_decode_with_entries. */
typedef struct ts_gpu_decoder ts_gpu_decoder;

/* device: a GPU, or TS_DEVICE_CPU. staging_bytes: the maximum of the plans of a run, with the head.
 * scratch_bytes: coefficients and samples of the images that are decoded at once; a batch that
 * needs more is decoded in parts, and an image that needs more by itself is refused. A crop takes
 * about 16 bytes a pixel at 4:4:4, and 12 at 4:2:0. */
TS_API ts_error* ts_gpu_decoder_new(int32_t device, int64_t max_images, size_t staging_bytes,
                                    size_t scratch_bytes, ts_gpu_decoder** decoder);
/* Returns the memory to LibTorch's allocator, in the order of the streams of the runs. Waits for
 * nothing. */
TS_API void ts_gpu_decoder_free(ts_gpu_decoder* decoder);

/* Returns the bytes at the beginning of the staging memory that a run of so many images writes. The
 * plans lie behind them. */
TS_API size_t ts_gpu_decoder_head_bytes(int64_t images);

typedef struct ts_gpu_decode_image {
  size_t plan;   /* byte of the staging memory where its plan begins, a multiple of 16 */
  size_t result; /* byte of the results where its pixels begin: window_height rows of
                    window_width * 3 bytes, without gaps */
} ts_gpu_decode_image;

/* Enqueues the decoding of `count` images, and returns. Neither allocates nor waits for the device.
 *
 * staging: pinned memory, aligned to 16 bytes, with `bytes` bytes of head and plans, written by
 * ts_image_plan_segments in this process. results: contiguous uint8 on the decoder's device.
 * failed: pinned memory of `count` numbers. Both pieces of host memory are borrowed until the work
 * that is enqueued here has completed. A decoder of the CPU takes any host memory, and a stream
 * whose device is TS_DEVICE_CPU.
 *
 * failed[i] is then 0, or 1 if the segments of image i are not as its plan says: its pixels are
 * undefined, those of the others are right, and the host has to decode the image.
 *
 * TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a plan that is none, for pixels that do not
 * fit into the results, and for an image that needs more scratch memory than there is.
 * TS_ERROR_CAPTURE while the stream is captured. */
TS_API ts_error* ts_gpu_decoder_run(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                                    const ts_gpu_decode_image* images, int64_t count,
                                    ts_tensor* results, int32_t* failed, ts_stream stream);

/* The entries that a run has found for a plan of ts_image_plan_scan. */
typedef struct ts_gpu_decode_entries {
  size_t plan;  /* byte of the staging memory where the plan begins */
  size_t to;    /* byte of the host memory where its entries go */
  size_t bytes; /* 10 for each of ts_image_search's entries */
} ts_gpu_decode_entries;

/* Enqueues copies of what the decoder's latest run has found, and returns. staging and `bytes` are
 * that run's, whose plans this call reads, and so is the stream. memory: pinned memory of
 * memory_bytes bytes, borrowed until the copies have completed. The entries of an image that the
 * run has flagged are undefined. TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a plan that
 * is none or has its own entries, and for entries of another size or without room. */
TS_API ts_error* ts_gpu_decoder_copy_entries(ts_gpu_decoder* decoder, const uint8_t* staging,
                                             size_t bytes, const ts_gpu_decode_entries* entries,
                                             int64_t count, uint8_t* memory, size_t memory_bytes,
                                             ts_stream stream);

/* ---- inflating on a GPU ---------------------------------------------------------------------- */

/* Inflates many ranges of raw deflate streams on a GPU, each from a checkpoint of ts_inflater: the
 * members of a .tgz, say, whose index has a checkpoint before each of them. The bytes are those of
 * the host's inflater.
 *
 * An inflater holds device memory, allocated by ts_gpu_inflater_new and by no other call. Its runs
 * share that memory, so they are on one stream, or on streams that are ordered. One thread uses an
 * inflater at a time. One of TS_DEVICE_CPU is as such a ts_gpu_decoder: for tests. */
typedef struct ts_gpu_inflater ts_gpu_inflater;

/* device: a GPU, or TS_DEVICE_CPU. staging_bytes: the maximum of the inputs and windows of a run,
 * with the head. */
TS_API ts_error* ts_gpu_inflater_new(int32_t device, int64_t max_ranges, size_t staging_bytes,
                                     ts_gpu_inflater** inflater);
/* Returns the memory to LibTorch's allocator, in the order of the streams of the runs. Waits for
 * nothing. */
TS_API void ts_gpu_inflater_free(ts_gpu_inflater* inflater);

/* Returns the bytes at the beginning of the staging memory that a run of so many ranges writes. */
TS_API size_t ts_gpu_inflater_head_bytes(int64_t ranges);

typedef struct ts_gpu_inflate_range {
  size_t input;        /* byte of the staging memory where the compressed bytes from the checkpoint
                          on begin, a multiple of 16, behind the head */
  size_t input_bytes;  /* at most 256 MiB; more than the range needs do no harm */
  size_t window;       /* byte of the staging memory where the packed window begins */
  size_t window_bytes; /* of the packed window, as docs/index-format.md describes it; 0: all bytes
                          before the checkpoint are 0 */
  size_t skip;         /* bytes of output from the checkpoint to the range */
  size_t bytes;        /* of the range; with `skip` at most 1 GiB */
  size_t room;         /* byte of the rooms, a multiple of 16, where TS_INFLATER_WINDOW_BYTES bytes
                          of window are written, then `skip` bytes of output, then the range. Rooms
                          do not overlap. */
  int32_t skip_bits;   /* 0 to 7: bits of the first byte that come before the checkpoint */
} ts_gpu_inflate_range;

typedef struct ts_gpu_inflate_result {
  int32_t failed;    /* 0, or 1 if the stream or the window is damaged, if the stream ends before
                        the range does or has more blocks than 1024 and one for each 64 bytes of
                        input, or than 16384, or if the packed window has more than 128 KiB */
  uint32_t checksum; /* CRC-32 (IEEE) of the range; 0 if it failed */
} ts_gpu_inflate_result;

/* Enqueues the inflating of `count` ranges, and returns. Neither allocates nor waits for the
 * device.
 *
 * staging: pinned memory, aligned to 16 bytes, with `bytes` bytes of head, inputs and windows.
 * rooms: contiguous uint8 on the inflater's device, aligned to 16 bytes. results: pinned memory of
 * `count` results. Both pieces of host memory are borrowed until the work that is enqueued here has
 * completed. An inflater of the CPU takes any host memory, and a stream whose device is
 * TS_DEVICE_CPU.
 *
 * The room of a range that failed is undefined, those of the others are right: no bytes of an input
 * or a window make the device read anything but these and the range's own room, or write anything
 * but that room. Damage behind a range is not noticed. The caller compares the checksum.
 *
 * TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a range whose memory is not inside the
 * staging memory or the rooms. TS_ERROR_CAPTURE while the stream is captured. */
TS_API ts_error* ts_gpu_inflater_run(ts_gpu_inflater* inflater, uint8_t* staging, size_t bytes,
                                     const ts_gpu_inflate_range* ranges, int64_t count,
                                     ts_tensor* rooms, ts_gpu_inflate_result* results,
                                     ts_stream stream);

/* ---- decoding JPEGs that a GPU inflates ------------------------------------------------------ */

/* Makes a ts_gpu_decoder for ts_gpu_decoder_run_inflating. rooms_bytes: the maximum of the rooms of
 * a run's members, each TS_INFLATER_WINDOW_BYTES, the bytes up to the end of its range, and 16. The
 * staging memory and the rooms together have less than 4 GiB. */
TS_API ts_error* ts_gpu_decoder_new_inflating(int32_t device, int64_t max_images,
                                              size_t staging_bytes, size_t scratch_bytes,
                                              size_t rooms_bytes, ts_gpu_decoder** decoder);

/* Returns the bytes at the beginning of the staging memory that a run of so many images and members
 * writes. */
TS_API size_t ts_gpu_decoder_inflating_head_bytes(int64_t images, int64_t members);

/* An image whose compressed data are in a deflate stream. */
typedef struct ts_gpu_decode_member {
  size_t image;               /* which of the images, whose plan ts_image_plan_head has written */
  size_t scan;                /* byte of the range where the data of its scan begin; they reach to
                                 the end of the range, or before it */
  ts_gpu_inflate_range range; /* its room is a byte of the decoder's rooms */
} ts_gpu_decode_member;

/* Does ts_gpu_decoder_run, after it has inflated the ranges of members, at most one an image. The
 * places of a range's input and window are those in the staging memory. inflated: pinned memory of
 * member_count results, borrowed as `failed` is.
 *
 * An image whose range failed, or has another checksum than it should have, was decoded from wrong
 * bytes: failed[i] may be 0, and the caller looks at inflated too. No bytes of a stream, a window
 * or an image make the device read or write outside of what belongs to the image. */
TS_API ts_error* ts_gpu_decoder_run_inflating(ts_gpu_decoder* decoder, uint8_t* staging,
                                              size_t bytes, const ts_gpu_decode_image* images,
                                              int64_t count, const ts_gpu_decode_member* members,
                                              int64_t member_count, ts_tensor* results,
                                              int32_t* failed, ts_gpu_inflate_result* inflated,
                                              ts_stream stream);

/* ---- traces ---------------------------------------------------------------------------------- */

/* A recording of what ran when, made with LibTorch's profiler: operators of all threads and, with a
 * GPU, the CUDA calls of all threads and the work of all devices. A process makes one recording at
 * a time; any thread may start it and any other stop it. */
typedef struct ts_trace ts_trace;

enum {
  TS_TRACE_KIND_KERNEL = 1, /* device work: lane is the stream's number */
  TS_TRACE_KIND_MEMCPY = 2,
  TS_TRACE_KIND_MEMSET = 3,
  TS_TRACE_KIND_RUNTIME = 4,  /* a call of the CUDA runtime or driver: lane is the OS thread */
  TS_TRACE_KIND_OPERATOR = 5, /* one of LibTorch's operators on the host */
  TS_TRACE_KIND_RANGE = 6     /* a named range of the program: lane is the thread that began it */
};

typedef struct ts_trace_event {
  int64_t start;       /* Unix time in nanoseconds; one clock for the host and all devices */
  int64_t duration;    /* nanoseconds */
  int64_t bytes;       /* of a memcpy or memset; otherwise -1 */
  int64_t correlation; /* equal for a runtime call and the device work that it enqueued */
  int64_t lane;
  int32_t device; /* TS_DEVICE_CPU for what ran on the host */
  int32_t kind;   /* TS_TRACE_KIND_ */
  int32_t name;   /* index into ts_trace_names */
} ts_trace_event;

/* How a kernel was launched. */
typedef struct ts_trace_launch {
  int64_t blocks;       /* of the grid */
  int32_t threads;      /* of a block */
  int32_t registers;    /* of a thread */
  int32_t shared_bytes; /* static and dynamic shared memory of a block */
  /* The maximum share of a multiprocessor's threads that blocks of this size hold at once, by
   * CUDA's occupancy calculator (cuda_occupancy.h); 0 if unknown. */
  double occupancy;
} ts_trace_launch;

enum {
  TS_TRACE_FLAG_NO_OPERATORS = 1 /* only device work and CUDA calls; ignored without a GPU */
};

/* Starts a recording. TS_ERROR_INVALID_ARGUMENT if one is under way. The first one of a process
 * initialises CUPTI. */
TS_API ts_error* ts_trace_start(int32_t flags);
/* Stops the recording. Waits for no device: work that is not done is left out, so synchronize
 * before. Events are in no order. */
TS_API ts_error* ts_trace_stop(ts_trace** trace);
TS_API void ts_trace_free(ts_trace* trace);
/* Returns the events, borrowed until the trace is freed. */
TS_API const ts_trace_event* ts_trace_events(const ts_trace* trace);
TS_API int64_t ts_trace_event_count(const ts_trace* trace);
/* Returns the names, borrowed until the trace is freed. */
TS_API const char* const* ts_trace_names(const ts_trace* trace);
TS_API int64_t ts_trace_name_count(const ts_trace* trace);
/* Returns a launch for each event of TS_TRACE_KIND_KERNEL, in the order of these events. Borrowed
 * until the trace is freed. */
TS_API const ts_trace_launch* ts_trace_launches(const ts_trace* trace);
TS_API int64_t ts_trace_launch_count(const ts_trace* trace);
/* Returns the lane of a stream's work: the profiler's number of it, unique on its device. */
TS_API ts_error* ts_trace_get_lane(ts_stream stream, int64_t* lane);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_H_ */
