/* Groups: collectives across processes, through Gloo or NCCL. */
#ifndef TS_GROUP_H_
#define TS_GROUP_H_

#include "torchstream/error.h"
#include "torchstream/store.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* This rank's part in a group of `size` ranks, each a process with one device. Groups use Gloo for
 * the CPU and NCCL for a GPU. All ranks of a group call the same functions in the same order. One
 * thread at a time may launch collectives.
 *
 * A group of GPUs runs a collective on the stream given to the call, in the stream's order; work
 * must be NULL. The first error of NCCL, or a collective that does not end within the group's
 * timeout, aborts all running collectives: kernels that wait for other ranks end, their results are
 * undefined, and every later collective fails.
 *
 * A group of CPUs runs a collective on Gloo's threads, which may write the result until
 * ts_work_wait returns. `stream` is ignored. */
typedef struct ts_group ts_group;
typedef struct ts_work ts_work;

/* Connects to the other ranks of the group, and blocks until all of them have called it. name:
 * unique in the store. ranks: the ranks of the `size` members in the whole job. device: a GPU, or
 * TS_DEVICE_CPU. timeout_nanoseconds: of a collective. Returns TS_ERROR_UNSUPPORTED for a GPU if
 * LibTorch has no NCCL. */
TS_API ts_error* ts_group_new(ts_store* store,
                              const char* name,
                              int32_t rank,
                              int32_t size,
                              const int32_t* ranks,
                              int32_t device,
                              int64_t timeout_nanoseconds,
                              ts_group** group);

/* Shuts the group down in order: waits for its work on GPUs. All ranks call it. */
TS_API ts_error* ts_group_shutdown(ts_group* group);

/* Aborts running collectives, from any thread: stops NCCL's kernels or closes Gloo's connections.
 * Running and later collectives fail on this rank, and on other ranks once they notice. */
TS_API ts_error* ts_group_abort(ts_group* group);

/* Frees a group. Waits for Gloo's threads, which abandon a collective after the group's timeout. */
TS_API void ts_group_free(ts_group* group);

enum { TS_GROUP_FAULT_NONE = 0, TS_GROUP_FAULT_TIMEOUT = 1, TS_GROUP_FAULT_COMMUNICATION = 2 };

/* Reports whether NCCL has failed or a collective on the GPU has exceeded its time. Does not block.
 * fault: a TS_GROUP_FAULT_ value; always TS_GROUP_FAULT_NONE for the CPU, where ts_work_wait
 * returns the error. */
TS_API ts_error* ts_group_get_fault(ts_group* group, int32_t* fault);

enum {
  TS_REDUCTION_SUM = 0,
  TS_REDUCTION_AVERAGE = 1, /* floating-point only */
  TS_REDUCTION_PRODUCT = 2,
  TS_REDUCTION_MIN = 3,
  TS_REDUCTION_MAX = 4
};

/* Collectives. Tensors are contiguous (for an exception see ts_group_broadcast), on the group's
 * device, and borrowed for the call; the work keeps references to the tensors that it needs. work:
 * NULL for a group of GPUs, otherwise new, freed with ts_work_free. */

/* Overwrites the tensor on every rank with the tensor of rank `root`. Here and in
 * ts_group_all_reduce the tensor's dimensions may be in any order in memory, without gaps and the
 * same on all ranks. */
TS_API ts_error* ts_group_broadcast(ts_group* group,
                                    ts_stream stream,
                                    ts_tensor* tensor,
                                    int32_t root,
                                    ts_work** work);

/* Overwrites the tensor on every rank with the reduction over all ranks. */
TS_API ts_error* ts_group_all_reduce(ts_group* group,
                                     ts_stream stream,
                                     ts_tensor* tensor,
                                     int32_t reduction,
                                     ts_work** work);

/* Reduces the inputs, divides the result into `size` equal parts, and writes part r to the output
 * of rank r. The input has `size` times as many elements as the output. */
TS_API ts_error* ts_group_reduce_scatter(ts_group* group,
                                         ts_stream stream,
                                         ts_tensor* output,
                                         const ts_tensor* input,
                                         int32_t reduction,
                                         ts_work** work);

/* Writes the inputs of all ranks, in rank order, to every rank's output. */
TS_API ts_error* ts_group_all_gather(ts_group* group,
                                     ts_stream stream,
                                     ts_tensor* output,
                                     const ts_tensor* input,
                                     ts_work** work);

/* Sends part r of the input to rank r, and writes the parts that this rank receives, in rank order,
 * to the output. output_rows, input_rows: the number of rows for each of `size` ranks, or both NULL
 * for equal parts. */
TS_API ts_error* ts_group_all_to_all(ts_group* group,
                                     ts_stream stream,
                                     ts_tensor* output,
                                     const ts_tensor* input,
                                     const int64_t* output_rows,
                                     const int64_t* input_rows,
                                     ts_work** work);

/* Sends the tensor to a rank, which receives a tensor of the same size and dtype.
 * timeout_nanoseconds applies on the CPU only; on a GPU the group's timeout does. */
TS_API ts_error* ts_group_send(ts_group* group,
                               ts_stream stream,
                               const ts_tensor* tensor,
                               int32_t to,
                               int64_t timeout_nanoseconds,
                               ts_work** work);
TS_API ts_error* ts_group_receive(ts_group* group,
                                  ts_stream stream,
                                  ts_tensor* tensor,
                                  int32_t from,
                                  int64_t timeout_nanoseconds,
                                  ts_work** work);

/* Blocks until the work is done. Returns TS_ERROR_OPERATOR if it failed or was aborted. */
TS_API ts_error* ts_work_wait(ts_work* work);

/* Makes ts_work_wait fail at once on all threads that wait in it. Gloo's threads may continue until
 * the group's timeout. */
TS_API ts_error* ts_work_abort(ts_work* work);
TS_API void ts_work_free(ts_work* work);

#ifdef __cplusplus
}
#endif

#endif /* TS_GROUP_H_ */
