/* Reducers: gradients averaged over a group while backward computes them. */
#ifndef TS_REDUCER_H_
#define TS_REDUCER_H_

#include "torchstream/error.h"
#include "torchstream/group.h"

#ifdef __cplusplus
extern "C" {
#endif

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
TS_API ts_error* ts_reducer_new(ts_group* group,
                                ts_stream stream,
                                ts_tensor* const* parameters,
                                int64_t count,
                                int32_t dtype,
                                ts_reducer** reducer);
TS_API void ts_reducer_free(ts_reducer* reducer);

/* Makes the buckets, in the order in which they are reduced. order: the indices of all parameters.
 * Bucket b has those from ends[b - 1], or 0, to ends[b] - 1, which have one dtype. Gradients that
 * are views of earlier buckets stay what they are. TS_ERROR_CAPTURE in a capture. */
TS_API ts_error* ts_reducer_arrange(ts_reducer* reducer,
                                    const int64_t* order,
                                    const int64_t* ends,
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

#ifdef __cplusplus
}
#endif

#endif /* TS_REDUCER_H_ */
