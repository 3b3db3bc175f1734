/* torchstream: LibTorch's streams, events, graphs, memory, tensors and operators as plain C. The
 * library is libtorchstream; its errors come from libtorchstream_image, which it links.
 *
 * The rules at the top of torchstream_image.h hold here. In addition:
 *
 *  - Thread state (current device, current stream, gradient mode, autocast, memory pool) never
 *    survives a call. The exceptions are the calls that exist to change it: ts_set_cuda_stream, and
 * the pairs ts_stream_guard_enter and ts_stream_guard_exit, ts_memory_pool_enter and
 * ts_memory_pool_exit, ts_graph_begin and ts_graph_end (or ts_graph_destroy). Both halves of a pair
 * are called on the same thread.
 *  - Work is enqueued on the calling thread's current stream of the device concerned, unless the
 *    function takes a stream.
 *  - Every symbol exists in every build. On a machine without a usable GPU a call that needs one
 *    returns TS_ERROR_NO_DEVICE.
 *  - A call that the host makes often takes its arguments by value or flat: ts_tensor_info, ts_arg,
 *    ts_arguments and ts_function have no size member and do not grow.
 */
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

/* Changes whenever a signature, a fixed struct or an enumerator of this header changes. A client
 * compares it with ts_abi_version() once at load. */
#define TS_ABI_VERSION 6

/* Returns the TS_ABI_VERSION of the loaded library. */
TS_API int32_t ts_abi_version(void);

/* Returns the version of LibTorch, for example "2.11.0". Static. */
TS_API const char* ts_libtorch_version(void);

/* Returns the version of the CUDA toolkit that the library was built with, for example "13.0"; ""
 * if it was built for a LibTorch without CUDA: then no machine has a usable GPU. Static. */
TS_API const char* ts_cuda_version(void);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_H_ */
