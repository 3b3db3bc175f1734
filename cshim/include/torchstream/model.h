/* Compiled models: networks that PyTorch's AOTInductor compiled to native code. */
#ifndef TS_MODEL_H_
#define TS_MODEL_H_

#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One instance of a compiled model. One call at a time uses it; other calls for the same instance
 * wait. */
typedef struct ts_model ts_model;

/* Loads a compiled model, and makes an instance with the weights that the library contains.
 * library: the path of the model's shared library. Its code has all rights of the process, and runs
 * during this call. kernels: the folder of the model's GPU kernels. Both must exist until
 * ts_model_free. device: TS_DEVICE_CPU or a GPU, as the library was compiled for. Waits for the
 * copies of the weights on the current stream. Returns TS_ERROR_UNSUPPORTED for a model that
 * computes some weights from others in its first run, because runs on other streams would not be
 * ordered after this computation. Not possible during a capture. */
TS_API ts_error* ts_model_open(const char* library,
                               const char* kernels,
                               int32_t device,
                               ts_model** model);

/* Makes another instance of a model. The instances share their weights. */
TS_API ts_error* ts_model_add_instance(const ts_model* model, ts_model** instance);

/* Ends the instance. Waits for a call that uses it. Before this call, the caller has to wait for
 * the instance's work on a GPU. A graph that has captured a run keeps the instance's memory. */
TS_API void ts_model_free(ts_model* model);

/* Returns the structure of the arguments and of the results, as JSON of PyTorch's pytree module.
 * Valid until ts_model_free. */
TS_API ts_error* ts_model_get_structure(const ts_model* model,
                                        const char** arguments,
                                        const char** results);

/* A weight: a parameter or buffer of the exported module, or a constant of its code. */
typedef struct ts_model_weight {
  int64_t count;        /* number of the model's weights */
  const char* name;     /* in the module's state_dict; NULL if there is no weight at the place */
  const int64_t* sizes; /* ndim of them */
  int32_t ndim;
  int32_t dtype; /* TS_DTYPE_, or another ScalarType of LibTorch */
  bool fixed;    /* ts_model_set_weights cannot replace it */
} ts_model_weight;

/* Describes the weight at a place, from 0 to count - 1 in the order of the names. Pointers are
 * valid until ts_model_free. */
TS_API ts_error* ts_model_get_weight(const ts_model* model, int64_t place, ts_model_weight* weight);

/* Replaces the weights at `count` places, each once, by copies of tensors of the same shapes, on
 * any device, converted to the weights' dtypes. The other weights keep their values. The instances
 * that share weights change together: a run uses either all of the old values or all of the new
 * ones, and a run that begins after this call uses the new ones. The old ones stay in memory until
 * the runs that read them are done. A graph that has captured a run becomes stale. The host waits
 * for the copies, on the current stream, and for runs that are being enqueued. Not possible during
 * a capture. */
TS_API ts_error* ts_model_set_weights(ts_model* model,
                                      const int64_t* places,
                                      ts_tensor* const* values,
                                      int64_t count);

/* The operator that copies a weight has the name TS_MODEL_READ_WEIGHT and the schema "(int model,
 * int place) -> Tensor". The copy is enqueued on the current stream of the model's device. */
#define TS_MODEL_READ_WEIGHT "torchstream::read_weight"

/* The operator that runs an instance has the name TS_MODEL_RUN and the schema "(int model, Tensor[]
 * inputs) -> Tensor[]". model: the instance's address. The work is enqueued on the current stream
 * of the model's device. Autograd records nothing, and autocast changes nothing. */
#define TS_MODEL_RUN "torchstream::run_model"

#ifdef __cplusplus
}
#endif

#endif /* TS_MODEL_H_ */
