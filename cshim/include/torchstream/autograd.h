/* Autograd: gradients, hooks, and functions with a custom backward. */
#ifndef TS_AUTOGRAD_H_
#define TS_AUTOGRAD_H_

#include "torchstream/error.h"
#include "torchstream/numerics.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Accumulates gradients into the leaves. gradient: of the tensor's shape; it may be NULL for a
 * scalar. flags: 0 or TS_GRAD_FLAG_RETAIN_GRAPH, combined with the pass's own switches
 * (TS_NUMERICS_ON). All nodes of the graph run under these switches, whatever switches their
 * forward had.
 *
 * The call blocks until all backward work is launched, not until the device has done it. Gradients
 * are ordered on the streams that are current at the call. If a callback (ts_autograd_callback)
 * fails, the call returns its error. Returns TS_ERROR_INVALID_ARGUMENT in an accumulation hook
 * (ts_tensor_add_accumulation_hook), which holds a lock that the call may need. */
TS_API ts_error* ts_tensor_backward(const ts_tensor* tensor,
                                    const ts_tensor* gradient,
                                    int32_t flags);
enum {
  TS_GRAD_FLAG_RETAIN_GRAPH = 1, /* keep the saved tensors for another call */
  TS_GRAD_FLAG_CREATE_GRAPH = 2, /* record the computation of the gradients; implies RETAIN_GRAPH */
  TS_GRAD_FLAG_ALLOW_UNUSED =
      4, /* return NULL, and no error, for an input that no output depends on */
  /* While a graph is captured, do not call the hooks of leaves. Use it for gradients that replays
   * hand to another backward pass, which calls the hooks. */
  TS_GRAD_FLAG_NO_LEAF_HOOKS = 8
};

/* Computes the gradients of the outputs with respect to the inputs, which need not be leaves, and
 * accumulates nothing. output_gradients: NULL, or one for each output, NULL for a scalar.
 * gradients: input_count new references. flags: TS_GRAD_FLAG_ values and the pass's own switches
 * (TS_NUMERICS_ON), combined with "or". Unlike ts_tensor_backward it may be called from an
 * accumulation hook. Otherwise the two behave alike. */
TS_API ts_error* ts_tensor_grads(ts_tensor* const* outputs,
                                 ts_tensor* const* output_gradients,
                                 int64_t output_count,
                                 ts_tensor* const* inputs,
                                 int64_t input_count,
                                 int32_t flags,
                                 ts_tensor** gradients);

/* Returns the gradient, or NULL if there is none. */
TS_API ts_error* ts_tensor_get_grad(const ts_tensor* tensor, ts_tensor** gradient);

/* Returns the gradients of `count` tensors, NULL for a tensor without one. */
TS_API ts_error* ts_tensor_get_grads(ts_tensor* const* tensors,
                                     int64_t count,
                                     ts_tensor** gradients);

/* Sets the gradient, which the tensor then shares. NULL removes it. */
TS_API ts_error* ts_tensor_set_grad(ts_tensor* tensor, const ts_tensor* gradient);

/* Removes the gradients of `count` tensors. */
TS_API ts_error* ts_tensor_clear_grads(ts_tensor* const* tensors, int64_t count);
TS_API ts_error* ts_tensor_set_requires_grad(ts_tensor* tensor, bool requires_grad);

/* Gives `count` leaves new accumulation nodes in graphs recorded from now on. Without this call a
 * leaf has one such node while any graph uses it. That node always runs on the stream on which it
 * was first used, even for graphs of other streams and of captures. Returns TS_ERROR_CAPTURE,
 * before any effect, if such a node has hooks, as c10d's own reducer adds them: they would no
 * longer be called. Hooks of the leaf itself stay and do not matter here. */
TS_API ts_error* ts_tensor_forget_accumulators(ts_tensor* const* leaves, int64_t count);

/* Returns TS_ERROR_INVALID_ARGUMENT, with the leaf's shape, if a backward pass from the outputs
 * gives a gradient to a leaf that requires grad and is not in `leaves`. */
TS_API ts_error* ts_tensor_check_leaves(ts_tensor* const* outputs,
                                        int64_t output_count,
                                        ts_tensor* const* leaves,
                                        int64_t leaf_count);

enum {
  TS_CALLBACK_FLAG_CREATE_GRAPH = 1 /* the pass records the computation of the gradients */
};

/* A callback: a function of the caller that a backward pass calls.
 *
 * context: the caller's number. tensors: borrowed for the call; NULL for an undefined gradient,
 * which counts as zeros. results: NULL at first; the callback may write new references, which the
 * library then owns. flags: TS_CALLBACK_FLAG_ values and the pass's own switches (TS_NUMERICS_ON),
 * combined with "or". It returns NULL, or an error, which the library then owns. After an error the
 * backward pass ends with that code and message, and the results are dropped.
 *
 * Threads. For tensors on the CPU the callback runs on the thread that called ts_tensor_backward or
 * ts_tensor_grads, inside that call. For tensors on a GPU it runs on LibTorch's thread of that
 * device, while the calling thread waits. The device's current stream is the one on which the
 * forward operation ran. The callback may call any function of this library on the same thread,
 * backward included. Gradient mode is on: use TS_OPERATOR_FLAG_NO_GRAD for operators that autograd
 * must not record. Autocast is off.
 *
 * The library owns the context of a successful call. ts_callbacks_take returns it when nothing can
 * call the callback with it any more: the hook was removed, or the tensor or graph node was freed.
 * If the call that passes the context fails, the caller keeps it. */
typedef ts_error* (*ts_autograd_callback)(int64_t context,
                                          int32_t flags,
                                          ts_tensor* const* tensors,
                                          int64_t count,
                                          ts_tensor** results,
                                          int64_t result_count);

/* A handle that removes a hook. */
typedef struct ts_hook ts_hook;

/* Calls back with the tensor's gradient in every backward pass that computes it, before it is used
 * or accumulated. The callback may return one result, of the same shape, dtype and device, which
 * replaces the gradient. If the tensor is changed in place later, the hook stays on the gradient of
 * the earlier values. The tensor must require grad. Do not call this while a backward pass uses the
 * tensor. hook: ends with ts_hook_free. */
TS_API ts_error* ts_tensor_add_gradient_hook(const ts_tensor* tensor,
                                             ts_autograd_callback callback,
                                             int64_t context,
                                             ts_hook** hook);

/* Calls back with a leaf each time a backward pass has added to its gradient (ts_tensor_get_grad).
 * The callback returns no results. ts_tensor_grads adds to no gradient, so it does not call the
 * hook. Otherwise like ts_tensor_add_gradient_hook. */
TS_API ts_error* ts_tensor_add_accumulation_hook(const ts_tensor* tensor,
                                                 ts_autograd_callback callback,
                                                 int64_t context,
                                                 ts_hook** hook);

/* Removes the hook. A callback that is already running finishes. Any thread may call this, any
 * number of times. */
TS_API void ts_hook_remove(ts_hook* hook);

/* Frees the handle. It does not remove the hook. */
TS_API void ts_hook_free(ts_hook* hook);

/* Calls back, without tensors, at the end of the running backward pass. Call it from a callback of
 * that pass; elsewhere it returns TS_ERROR_INVALID_ARGUMENT. By then all gradients are accumulated
 * and ordered on the streams that were current when ts_tensor_backward was called, and these
 * streams are current again. A pass that fails does not call back. */
TS_API ts_error* ts_backward_add_callback(ts_autograd_callback callback, int64_t context);

/* A function of the caller, after its forward: its inputs, its outputs, and its backward. */
typedef struct ts_function {
  const char* name;         /* for messages; copied */
  ts_tensor* const* inputs; /* borrowed for the call, like the tensors below */
  int64_t input_count;
  /* Computed from the inputs with TS_OPERATOR_FLAG_NO_GRAD. An output may be an input, or a view of
   * one, but not an input that forward has changed in place. */
  ts_tensor* const* outputs;
  int64_t output_count;
  const bool* constant;    /* for each output, true if it has no gradient; or NULL */
  ts_tensor* const* saved; /* tensors that backward needs: inputs, outputs or others */
  int64_t saved_count;
  /* Receives the gradient of each output (zeros where nothing used the output, NULL where it is
   * constant), followed by the saved tensors. It returns the gradients of the inputs; NULL means
   * zeros. The gradient of an input that does not require grad is dropped. With
   * TS_CALLBACK_FLAG_CREATE_GRAPH autograd must record its operators. */
  ts_autograd_callback backward;
  int64_t context;
} ts_function;

/* Makes a graph node for the function. The results are the outputs, with the node as their history.
 * At least one input must require grad. A backward pass fails if the saved tensors were freed or
 * changed in place. results: output_count new references. The node owns the context. */
TS_API ts_error* ts_function_attach(ts_function function, ts_tensor** results);

/* Returns the number of callbacks that are running on the calling thread, one inside another. */
TS_API int32_t ts_callback_depth(void);

/* Moves contexts that nothing uses any more to `contexts`, and returns their number. LibTorch frees
 * graphs on any thread, where code of the caller may not run. */
TS_API int64_t ts_callbacks_take(int64_t* contexts, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* TS_AUTOGRAD_H_ */
