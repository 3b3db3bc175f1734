/* Graphs: work that is captured once and then replayed. */
#ifndef TS_GRAPH_H_
#define TS_GRAPH_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A sequence of work on one device that is captured once and then enqueued by one call. Any number
 * of threads may replay a graph at once.
 *
 * A capture covers one stream, which is current on the thread from ts_graph_begin to ts_graph_end,
 * and every stream that is forked from it and joined again (ts_stream_fork, ts_wait_cuda_stream,
 * events). Operators called during the capture run nothing: they become nodes of the graph. Other
 * threads and streams continue, with two exceptions. Operators elsewhere that draw random numbers
 * return TS_ERROR_BUSY, because the capture owns the generators. ts_device_synchronize and
 * ts_allocator_empty_cache wait for the capture to end, because CUDA would otherwise invalidate it.
 * The process makes one capture at a time; ts_graph_begin waits for its turn.
 *
 * Memory allocated during the capture belongs to the graph, and every replay overwrites it. The
 * graph keeps tensors from outside (operands of operators) alive. A replay returns TS_ERROR_STALE
 * if one of them has new memory since the capture. The caller must keep pinned memory that the
 * graph copies from. */
typedef struct ts_graph ts_graph;

/* Starts to capture the stream, which must be the calling thread's current stream, non-blocking,
 * and not a default stream. share: NULL, or a captured graph of the device whose memory the new
 * graph uses too. Graphs that share memory overwrite each other's results, and their replays run
 * one after the other, on any streams. Returns TS_ERROR_CAPTURE if the thread is already capturing
 * or is inside a memory pool. */
TS_API ts_error* ts_graph_begin(ts_stream stream, const ts_graph* share, ts_graph** graph);

/* Ends the capture and makes the graph ready for replay. If the capture was invalidated or is
 * empty, returns TS_ERROR_CAPTURE with the name of the call at fault; stream, allocators and
 * generators are then as if there had been no capture. Returns TS_ERROR_WRONG_THREAD on another
 * thread than the one that started it. */
TS_API ts_error* ts_graph_end(ts_graph* graph);

/* Enqueues the graph's work on the stream. Random numbers continue from the device's generator. */
TS_API ts_error* ts_graph_replay(ts_graph* graph, ts_stream stream);

/* Returns the number of nodes, 0 before the capture has ended. */
TS_API int64_t ts_graph_node_count(const ts_graph* graph);

typedef struct ts_graph_nodes {
  size_t size; /* sizeof(ts_graph_nodes), set by the caller */
  int64_t kernels;
  int64_t copies;
  int64_t fills;
  int64_t host_functions;
  int64_t event_records; /* records of events with TS_EVENT_FLAG_EXTERNAL */
  int64_t event_waits;
  int64_t empty; /* joins of several edges */
  int64_t others;
} ts_graph_nodes;

/* Returns the number of nodes of each kind. */
TS_API ts_error* ts_graph_get_nodes(const ts_graph* graph, ts_graph_nodes* nodes);

/* Keeps the cudaGraph_t for ts_graph_dump; otherwise the end of the capture frees it. Call it
 * between ts_graph_begin and ts_graph_end. */
TS_API ts_error* ts_graph_keep_for_dump(ts_graph* graph);

/* Writes the nodes and edges to a file in Graphviz's language. verbose: include the parameters of
 * every node. Returns TS_ERROR_INVALID_ARGUMENT without ts_graph_keep_for_dump. */
TS_API ts_error* ts_graph_dump(const ts_graph* graph, const char* path, bool verbose);

/* Returns the cudaGraphExec_t, and the cudaGraph_t (0 without ts_graph_keep_for_dump), borrowed
 * until the graph is destroyed. */
TS_API ts_error* ts_graph_get_handles(const ts_graph* graph,
                                      uintptr_t* cuda_graph_exec,
                                      uintptr_t* cuda_graph);

/* Destroys a graph. A capture that has not ended is discarded. Only the thread that started the
 * capture can do so: on another thread the call returns TS_ERROR_WRONG_THREAD. Replays already
 * enqueued complete normally. Memory of tensors made in the capture stays until they are freed. */
TS_API ts_error* ts_graph_destroy(ts_graph* graph);

/* Blocks until no capture is running. */
TS_API ts_error* ts_capture_wait(void);

/* Reports whether the calling thread captures or its current stream is captured. Calls that would
 * wait for the capture to end, or invalidate it, then return TS_ERROR_CAPTURE at once. */
TS_API ts_error* ts_capture_is_active(bool* active);

#ifdef __cplusplus
}
#endif

#endif /* TS_GRAPH_H_ */
