/* Events: points in a stream's work, to wait for and to measure time between. */
#ifndef TS_EVENT_H_
#define TS_EVENT_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Any number of threads may use an event at once. A wait refers to the latest record that was
 * enqueued before it. If one thread records and another waits, the program has to order the two
 * calls. */
typedef struct ts_event ts_event;

enum {
  TS_EVENT_FLAG_TIMING = 1,       /* for ts_event_get_elapsed */
  TS_EVENT_FLAG_BLOCKING = 2,     /* ts_event_synchronize sleeps instead of spinning */
  TS_EVENT_FLAG_INTERPROCESS = 4, /* for ts_event_export; excludes TS_EVENT_FLAG_TIMING */
  /* A captured record or wait becomes a node of the graph instead of an edge: each replay records
   * the event, or waits for its latest record, as an enqueued call does. So other work can wait for
   * a point inside a replay, a replay can wait for other work, and two records measure the time
   * between two points. The event counts as recorded from the first replay on. A wait needs an
   * earlier record outside the capture. */
  TS_EVENT_FLAG_EXTERNAL = 8
};

/* Makes an event. Its first record creates the CUDA event, on that stream's device; later records
 * must be on the same device. flags: TS_EVENT_FLAG_ values, combined with "or". */
TS_API ts_error* ts_event_new(int32_t flags, ts_event** event);

/* Frees an event. Work already enqueued still waits for it. */
TS_API void ts_event_free(ts_event* event);
TS_API ts_error* ts_event_record(ts_event* event, ts_stream stream);

/* Makes the stream wait for the event's latest record: work enqueued on the stream after this call
 * starts only after that record. The host does not block. Returns TS_ERROR_NOT_RECORDED if there is
 * no record. Returns TS_ERROR_CAPTURE if only one of stream and record belongs to the running
 * capture and the other cannot join it, and if the record was part of a capture that has ended. */
TS_API ts_error* ts_stream_wait_event(ts_stream stream, const ts_event* event);

/* Returns the device of the event's records and its cudaEvent_t, borrowed until the event is freed.
 * Returns TS_ERROR_NOT_RECORDED before the first record, which creates the CUDA event. */
TS_API ts_error* ts_event_get_handle(const ts_event* event, int32_t* device, uintptr_t* cuda_event);

/* Reports whether the latest record is complete. Returns TS_ERROR_NOT_RECORDED if there is none,
 * TS_ERROR_CAPTURE if it is part of a graph. */
TS_API ts_error* ts_event_query(const ts_event* event, bool* done);

/* Blocks until the latest record is complete. Fails like ts_event_query. */
TS_API ts_error* ts_event_synchronize(const ts_event* event);

/* Returns the time on the device between two records, with CUDA's resolution of about half a
 * microsecond. Returns TS_ERROR_NOT_RECORDED if one of them has no record. Returns
 * TS_ERROR_INVALID_ARGUMENT if one of them lacks TS_EVENT_FLAG_TIMING or is not complete, or if
 * they are of different devices. */
TS_API ts_error* ts_event_get_elapsed(const ts_event* start,
                                      const ts_event* end,
                                      int64_t* nanoseconds);

/* Size of the handle of an event shared between processes. */
#define TS_EVENT_HANDLE_BYTES 64
/* Writes a handle of TS_EVENT_HANDLE_BYTES bytes, which another process on the machine passes to
 * ts_event_import while this event exists. Both processes may record the event and wait for it.
 * This process cannot see the other's records, so such an event counts as recorded: waiting for it
 * before any record is no error and orders nothing. device: the GPU of the records. Both processes
 * use the same GPU, which may have another index in each. */
TS_API ts_error* ts_event_export(ts_event* event, int32_t device, uint8_t* handle);

/* Makes an event from another process's handle. */
TS_API ts_error* ts_event_import(int32_t device, const uint8_t* handle, ts_event** event);

#ifdef __cplusplus
}
#endif

#endif /* TS_EVENT_H_ */
