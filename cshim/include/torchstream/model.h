/* Compiled models: networks that PyTorch's AOTInductor compiled to native code. */
#ifndef TS_MODEL_H_
#define TS_MODEL_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One instance of a compiled model. One call at a time may use it; other calls for the same
 * instance wait. Instances are independent of each other. */
typedef struct ts_model ts_model;

/* Loads a compiled model, and makes an instance with the constants (weights and buffers) that the
 * library contains. library: the path of the model's shared library. Its code has all rights of the
 * process, and runs during this call. kernels: the folder of the model's GPU kernels. Both must
 * exist until ts_model_free. device: TS_DEVICE_CPU or a GPU, as the library was compiled for. */
TS_API ts_error* ts_model_open(const char* library,
                               const char* kernels,
                               int32_t device,
                               ts_model** model);

/* Frees the instance. Waits for a call that uses it. The caller waits for the instance's work on a
 * GPU first. */
TS_API void ts_model_free(ts_model* model);

/* Returns the structure of the arguments and of the results, as JSON of PyTorch's pytree module.
 * Valid until ts_model_free. */
TS_API ts_error* ts_model_get_structure(const ts_model* model,
                                        const char** arguments,
                                        const char** results);

/* Returns the number of constants that can be replaced. PyTorch compiles small constants into the
 * code. */
TS_API int64_t ts_model_constant_count(const ts_model* model);

/* Returns a constant's name in the exported module, for example "layer1.0.weight". Valid until
 * ts_model_free. NULL for an index out of range. */
TS_API const char* ts_model_constant_name(const ts_model* model, int64_t index);

/* Returns the constants in use, in the order of ts_model_constant_name. tensors: an array of
 * ts_model_constant_count new references, which share the instance's memory. The memory that the
 * library's own constants have ends with the instance, and with the first
 * ts_model_set_constants. */
TS_API ts_error* ts_model_get_constants(ts_model* model, ts_tensor** tensors);

/* Replaces all constants. tensors: ts_model_constant_count tensors in the order of
 * ts_model_constant_name, each with the dtype, shape, strides and device of the constant that it
 * replaces. The instance shares their memory, and keeps a reference until they are replaced. What
 * the model computes from constants alone is computed anew, on the current stream of the model's
 * device; the call blocks until that is done. Work that was enqueued before may still read the old
 * constants: the caller keeps them until it is done. If the call fails, the constants are
 * unchanged. */
TS_API ts_error* ts_model_set_constants(ts_model* model, ts_tensor* const* tensors, int64_t count);

/* The operator that runs an instance has the name TS_MODEL_RUN and the schema
 * "(int model, Tensor[] constants, Tensor[] inputs) -> Tensor[]". model: the instance's address.
 * constants: the constants in use, which a graph that is being captured keeps alive. The work is
 * enqueued on the current stream of the model's device. Autograd records nothing. */
#define TS_MODEL_RUN "torchstream::run_model"

#ifdef __cplusplus
}
#endif

#endif /* TS_MODEL_H_ */
