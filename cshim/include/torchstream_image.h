/* torchstream_image: compressed images to pixels, augmentation and inflate, as plain C. The library
 * libtorchstream_image needs neither LibTorch nor a GPU. torchstream.h has the rest. Each header in
 * torchstream/ is about one noun and can be included alone.
 *
 * Rules for every function of both headers:
 *
 * - Names. A function is ts_<noun>_<verb>, a type is ts_<noun>, an enumerator is TS_<NOUN>_<VALUE>.
 *   ts_X_get_y fills in the y of X, and can fail; a getter that cannot fail returns its value and
 *   has no verb. Three calls in stream.h have PyTorch's names instead.
 * - Errors. A function that can fail returns ts_error*. NULL means success; otherwise the caller
 *   owns the error and frees it with ts_error_free. There is no "last error", since the next call
 *   may be made on another thread. A function checks its arguments before it does anything, and on
 *   failure it leaves the output parameters alone. When CUDA or an operator fails in the middle of
 *   a call (TS_ERROR_CUDA, TS_ERROR_OPERATOR, TS_ERROR_OUT_OF_MEMORY), the work enqueued so far
 *   stays enqueued.
 * - Parameters. Outputs are last. The position of an object that a call writes into (dst) is
 *   documented with the function. A number of bytes is size_t, every other count is int64_t, and a
 *   time or duration is int64_t nanoseconds. Strings are UTF-8 and end with NUL unless the function
 *   takes their length.
 * - Ownership. Every pointer parameter is borrowed for the call unless its comment says "takes
 *   ownership" or "borrowed until". The caller owns an object that an output parameter returns, and
 *   ends it with the noun's _free or _destroy.
 * - Ends. ts_X_free returns nothing, cannot fail, takes ownership and accepts NULL. A noun whose
 *   end can fail has ts_X_destroy instead: it returns its error, accepts NULL, and takes ownership
 *   only if it succeeds.
 * - NULL. No function crashes for a NULL object. Functions that return no error return NULL, 0, ""
 *   or, for a file descriptor, -1.
 * - Growth. A struct whose first member is `size` may grow. The caller sets size to sizeof(the
 *   struct) before every call; the library reads and writes no further. Other structs are fixed for
 *   an ABI version.
 * - Threads. Any thread may call any function. Two threads must not use one object at once unless
 *   the comment on its type says that they may. */
#ifndef TORCHSTREAM_IMAGE_H_
#define TORCHSTREAM_IMAGE_H_

#include "torchstream/api.h"
#include "torchstream/augmenter.h"
#include "torchstream/error.h"
#include "torchstream/image.h"
#include "torchstream/image_entries.h"
#include "torchstream/image_plan.h"
#include "torchstream/inflater.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of torchstream, for both headers. */
#define TS_VERSION_MAJOR 0
#define TS_VERSION_MINOR 1
#define TS_VERSION_PATCH 0

/* Changes whenever a signature, a fixed struct or an enumerator of the image library changes. A
 * client compares it with ts_image_abi_version() once, when it loads the library. */
#define TS_IMAGE_ABI_VERSION 3

/* Returns the TS_IMAGE_ABI_VERSION of the loaded library. */
TS_API int32_t ts_image_abi_version(void);

/* Returns the name and version of the JPEG library, for example "libjpeg-turbo 2.1.5". The string
 * is static. */
TS_API const char* ts_jpeg_version(void);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_IMAGE_H_ */
