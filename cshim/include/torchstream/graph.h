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
TS_API ts_error* ts_graph_get_handles(const ts_graph* graph,
                                      uintptr_t* cuda_graph_exec,
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

#ifdef __cplusplus
}
#endif

#endif /* TS_GRAPH_H_ */
