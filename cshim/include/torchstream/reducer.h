/* Reducers: average gradients over a group while backward computes them. */
#ifndef TS_REDUCER_H_
#define TS_REDUCER_H_

#include "torchstream/error.h"
#include "torchstream/group.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Averages gradients over a group of ranks while backward computes them. It copies gradients into
 * flat buckets, and reduces a bucket as soon as it and all buckets before it are full, on the
 * reducer's stream or on Gloo's threads, while backward continues. Afterwards the gradients are
 * views of the buckets, unless the buckets have another dtype. All ranks have equal parameters and
 * buckets. One thread at a time uses a reducer, except for ts_reducer_abort. */
typedef struct ts_reducer ts_reducer;

/* Makes a reducer without buckets, and adds a hook to each parameter until the reducer is freed.
 * group: borrowed until then. stream: for a group of GPUs, the stream that reduces buckets; nothing
 * else may use it. parameters: leaves that require grad, on the group's device. dtype: of the
 * buckets, or -1 for the parameters' dtype. */
TS_API ts_error* ts_reducer_new(ts_group* group,
                                ts_stream stream,
                                ts_tensor* const* parameters,
                                int64_t count,
                                int32_t dtype,
                                ts_reducer** reducer);
TS_API void ts_reducer_free(ts_reducer* reducer);

/* Makes the buckets, in the order in which they are reduced. order: the indices of all parameters.
 * Bucket b has the parameters order[ends[b - 1]] (order[0] for b = 0) to order[ends[b] - 1], which
 * must have one dtype. Gradients that are views of earlier buckets do not change. Returns
 * TS_ERROR_CAPTURE in a capture. */
TS_API ts_error* ts_reducer_arrange(ts_reducer* reducer,
                                    const int64_t* order,
                                    const int64_t* ends,
                                    int64_t bucket_count);

/* Makes the next backward reduce its gradients. Without this call, backward accumulates gradients
 * on this rank only. */
TS_API ts_error* ts_reducer_begin(ts_reducer* reducer);

/* Reduces the remaining buckets, with zeros for parameters without a gradient, and waits for all
 * reductions: on the CPU the calling thread waits, on a GPU its current stream. unused: for each
 * parameter, true if this rank had no gradient. After an error call ts_reducer_cancel. */
TS_API ts_error* ts_reducer_join(ts_reducer* reducer, bool* unused);

/* Cancels the reduction that ts_reducer_begin started, after an error. Reductions that are already
 * running continue. On the CPU the parameters in their buckets have no gradient afterwards, because
 * the running reductions would still change it. ts_reducer_begin returns TS_ERROR_INVALID_ARGUMENT
 * until these reductions are done, at the latest after the group's timeout. On a GPU the reductions
 * still write to gradients on the reducer's stream: order your stream after it before you use or
 * change the gradients, also in another backward. */
TS_API ts_error* ts_reducer_cancel(ts_reducer* reducer);

/* Makes a running or later ts_reducer_join fail, from any thread. */
TS_API ts_error* ts_reducer_abort(ts_reducer* reducer);

/* Returns the indices of the parameters in the order in which the last backward computed their
 * gradients. order: room for all parameters. count: the number of parameters that had a gradient.
 */
TS_API ts_error* ts_reducer_get_order(ts_reducer* reducer, int64_t* order, int64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* TS_REDUCER_H_ */
