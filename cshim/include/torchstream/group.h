/* Groups: collectives of several processes, through Gloo or NCCL. */
#ifndef TS_GROUP_H_
#define TS_GROUP_H_

#include "torchstream/error.h"
#include "torchstream/store.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

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
TS_API ts_error* ts_group_new(ts_store* store,
                              const char* name,
                              int32_t rank,
                              int32_t size,
                              const int32_t* ranks,
                              int32_t device,
                              int64_t timeout_nanoseconds,
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
TS_API ts_error* ts_group_broadcast(ts_group* group,
                                    ts_stream stream,
                                    ts_tensor* tensor,
                                    int32_t root,
                                    ts_work** work);

/* Overwrites the tensor of every rank with the reduction of all. */
TS_API ts_error* ts_group_all_reduce(ts_group* group,
                                     ts_stream stream,
                                     ts_tensor* tensor,
                                     int32_t reduction,
                                     ts_work** work);

/* Reduces the inputs and writes part r of the result, of `size` equal ones, to the output of rank
 * r. The input has `size` times the elements of the output. */
TS_API ts_error* ts_group_reduce_scatter(ts_group* group,
                                         ts_stream stream,
                                         ts_tensor* output,
                                         const ts_tensor* input,
                                         int32_t reduction,
                                         ts_work** work);

/* Writes the inputs of all ranks, in the order of ranks, to every output. */
TS_API ts_error* ts_group_all_gather(ts_group* group,
                                     ts_stream stream,
                                     ts_tensor* output,
                                     const ts_tensor* input,
                                     ts_work** work);

/* Sends part r of the input to rank r, and writes what the ranks send here, in the order of ranks,
 * to the output. output_rows, input_rows: `size` numbers of rows, or both NULL for equal parts. */
TS_API ts_error* ts_group_all_to_all(ts_group* group,
                                     ts_stream stream,
                                     ts_tensor* output,
                                     const ts_tensor* input,
                                     const int64_t* output_rows,
                                     const int64_t* input_rows,
                                     ts_work** work);

/* Sends the tensor to a rank, which receives one of the same size and dtype. The timeout is the
 * CPU's; on a GPU the group's holds. */
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

/* Blocks until the work is done. TS_ERROR_OPERATOR if it failed or was aborted. */
TS_API ts_error* ts_work_wait(ts_work* work);

/* Makes ts_work_wait fail at once, on all threads that are in it. What Gloo's threads still do goes
 * on until the group's timeout. */
TS_API ts_error* ts_work_abort(ts_work* work);
TS_API void ts_work_free(ts_work* work);

#ifdef __cplusplus
}
#endif

#endif /* TS_GROUP_H_ */
