/* Compiled models: networks that PyTorch's AOTInductor compiled to native code. */
#ifndef TS_MODEL_H_
#define TS_MODEL_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One instance of a compiled model, with its weights. One call at a time uses it; other calls for
 * the same instance wait. Instances are independent of each other. */
typedef struct ts_model ts_model;

/* Loads a compiled model, and makes an instance with the weights that the library contains.
 * library: the path of the model's shared library. Its code has all rights of the process, and runs
 * during this call. kernels: the folder of the model's GPU kernels. Both must exist until
 * ts_model_free. device: TS_DEVICE_CPU or a GPU, as the library was compiled for. Returns
 * TS_ERROR_UNSUPPORTED for a model that computes some weights from others in its first run, because
 * runs on other streams would not be ordered after this computation. Not possible during a capture.
 */
TS_API ts_error* ts_model_open(const char* library,
                               const char* kernels,
                               int32_t device,
                               ts_model** model);

/* Ends the instance. Waits for a call that uses it. Before this call, the caller has to wait for
 * the instance's work on a GPU. A graph that has captured a run keeps the instance's memory. */
TS_API void ts_model_free(ts_model* model);

/* Returns the structure of the arguments and of the results, as JSON of PyTorch's pytree module.
 * Valid until ts_model_free. */
TS_API ts_error* ts_model_get_structure(const ts_model* model,
                                        const char** arguments,
                                        const char** results);

/* The operator that runs an instance has the name TS_MODEL_RUN and the schema "(int model, Tensor[]
 * inputs) -> Tensor[]". model: the instance's address. The work is enqueued on the current stream
 * of the model's device. Autograd records nothing, and autocast changes nothing. */
#define TS_MODEL_RUN "torchstream::run_model"

#ifdef __cplusplus
}
#endif

#endif /* TS_MODEL_H_ */
