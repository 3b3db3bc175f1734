/* torchstream: LibTorch's streams, events, graphs, memory, tensors and operators as plain C. The
 * library is libtorchstream. It links libtorchstream_image, which has the functions of errors.
 *
 * The headers in torchstream/, each of which can be included alone:
 *
 * - Devices: device.h, allocator.h, memory_pool.h, memory_observer.h, pinned.h.
 * - Order of work: stream.h, event.h, notifier.h, graph.h.
 * - Tensors: tensor.h, operator.h, fused.h, autograd.h, random.h, numerics.h, dlpack.h, ipc.h.
 * - Images on a GPU: gpu_decoder.h, gpu_inflater.h.
 * - Several processes: store.h, group.h, reducer.h.
 * - Observation: range.h, trace.h, sanitizer.h, thread.h.
 *
 * The rules at the top of torchstream_image.h apply here too. In addition:
 *
 * - A call never changes thread state (current device, current stream, gradient mode, autocast,
 *   memory pool) beyond its end. The exceptions are the calls that exist to change it:
 *   ts_set_cuda_stream, and the pairs ts_stream_guard_enter and ts_stream_guard_exit,
 *   ts_memory_pool_enter and ts_memory_pool_exit, ts_graph_begin and ts_graph_end (or
 *   ts_graph_destroy). Call both halves of a pair on the same thread.
 * - Work is enqueued on the calling thread's current stream of the device, unless the function
 *   takes a stream.
 * - Every symbol exists in every build. On a machine without a usable GPU, a call that needs one
 *   returns TS_ERROR_NO_DEVICE.
 * - Frequent calls take small fixed structs or flat arguments: ts_tensor_info, ts_arg, ts_arguments
 *   and ts_function have no size member and do not grow. */
#ifndef TORCHSTREAM_H_
#define TORCHSTREAM_H_

#include "torchstream/allocator.h"
#include "torchstream/autograd.h"
#include "torchstream/device.h"
#include "torchstream/dlpack.h"
#include "torchstream/event.h"
#include "torchstream/fused.h"
#include "torchstream/gpu_decoder.h"
#include "torchstream/gpu_inflater.h"
#include "torchstream/graph.h"
#include "torchstream/group.h"
#include "torchstream/ipc.h"
#include "torchstream/memory_observer.h"
#include "torchstream/memory_pool.h"
#include "torchstream/model.h"
#include "torchstream/notifier.h"
#include "torchstream/numerics.h"
#include "torchstream/operator.h"
#include "torchstream/pinned.h"
#include "torchstream/random.h"
#include "torchstream/range.h"
#include "torchstream/reducer.h"
#include "torchstream/sanitizer.h"
#include "torchstream/store.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"
#include "torchstream/thread.h"
#include "torchstream/trace.h"
#include "torchstream_image.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever a signature, a fixed struct or an enumerator of libtorchstream changes. A client
 * compares it with ts_abi_version() once, when it loads the library. */
#define TS_ABI_VERSION 6

/* Returns the TS_ABI_VERSION of the loaded library. */
TS_API int32_t ts_abi_version(void);

/* Returns the version of LibTorch, for example "2.11.0". The string is static. */
TS_API const char* ts_libtorch_version(void);

/* Returns the version of the CUDA toolkit that the library was built with, for example "13.0". It
 * is "" for a build against a LibTorch without CUDA, where no GPU is usable. The string is static.
 */
TS_API const char* ts_cuda_version(void);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_H_ */
