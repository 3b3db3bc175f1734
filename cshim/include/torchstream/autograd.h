/* Autograd: gradients, hooks, and functions of the caller with a backward. */
#ifndef TS_AUTOGRAD_H_
#define TS_AUTOGRAD_H_

#include "torchstream/error.h"
#include "torchstream/numerics.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Accumulates gradients into the leaves. Without a gradient (NULL) the tensor must be a scalar;
 * otherwise the gradient has its shape. Blocks for the launch of all backward work, not for the
 * device. Gradients are ordered on the streams that are current at the call. The error of a
 * callback (ts_autograd_callback) is this call's. TS_ERROR_INVALID_ARGUMENT in an accumulation hook
 * (ts_tensor_add_accumulation_hook), which holds the lock that the call may need. flags: 0 or
 * TS_GRAD_FLAG_RETAIN_GRAPH, and the pass's own switches (TS_NUMERICS_ON), under which each node of
 * the graph runs, whatever those of its forward were. */
TS_API ts_error* ts_tensor_backward(const ts_tensor* tensor,
                                    const ts_tensor* gradient,
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
TS_API ts_error* ts_tensor_grads(ts_tensor* const* outputs,
                                 ts_tensor* const* output_gradients,
                                 int64_t output_count,
                                 ts_tensor* const* inputs,
                                 int64_t input_count,
                                 int32_t flags,
                                 ts_tensor** gradients);

/* Returns the gradient, NULL if there is none. */
TS_API ts_error* ts_tensor_get_grad(const ts_tensor* tensor, ts_tensor** gradient);

/* Returns the gradients of `count` tensors, NULL for a tensor that has none. */
TS_API ts_error* ts_tensor_get_grads(ts_tensor* const* tensors,
                                     int64_t count,
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
TS_API ts_error* ts_tensor_check_leaves(ts_tensor* const* outputs,
                                        int64_t output_count,
                                        ts_tensor* const* leaves,
                                        int64_t leaf_count);

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
typedef ts_error* (*ts_autograd_callback)(int64_t context,
                                          int32_t flags,
                                          ts_tensor* const* tensors,
                                          int64_t count,
                                          ts_tensor** results,
                                          int64_t result_count);

/* The means to remove a hook. */
typedef struct ts_hook ts_hook;

/* Calls back with the tensor's gradient in every backward pass that computes it, before it is used
 * or accumulated. The callback's one result, if there is one, takes the gradient's place: it has
 * its shape, dtype and device. A tensor that is changed in place later keeps the hook on the
 * gradient of its values before. The tensor requires grad. Not beside a backward pass that uses the
 * tensor. hook: ends with ts_hook_free. */
TS_API ts_error* ts_tensor_add_gradient_hook(const ts_tensor* tensor,
                                             ts_autograd_callback callback,
                                             int64_t context,
                                             ts_hook** hook);

/* Calls back with a leaf after each backward pass has added to its gradient (ts_tensor_get_grad),
 * without results. ts_tensor_grads adds to none. Otherwise as ts_tensor_add_gradient_hook. */
TS_API ts_error* ts_tensor_add_accumulation_hook(const ts_tensor* tensor,
                                                 ts_autograd_callback callback,
                                                 int64_t context,
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

#ifdef __cplusplus
}
#endif

#endif /* TS_AUTOGRAD_H_ */
