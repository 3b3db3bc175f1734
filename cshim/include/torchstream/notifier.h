/* Notifiers: tell the host that a stream has reached a point. */
#ifndef TS_NOTIFIER_H_
#define TS_NOTIFIER_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A queue of tokens with a file descriptor. A driver thread adds tokens and runs no other code; the
 * descriptor wakes a waiter, as for a socket. Any number of threads may use a notifier at once. It
 * needs no GPU itself. */
typedef struct ts_notifier ts_notifier;

TS_API ts_error* ts_notifier_new(ts_notifier** notifier);

/* Frees a notifier. Tokens that arrive later are dropped. */
TS_API void ts_notifier_free(ts_notifier* notifier);

/* Returns an eventfd, non-blocking, borrowed until the notifier is freed. It is readable when
 * tokens have arrived since it was last read. Read its 8 bytes, then call ts_notifier_take until it
 * returns fewer tokens than its capacity. */
TS_API int32_t ts_notifier_fd(const ts_notifier* notifier);

/* Moves up to `capacity` tokens to `tokens`, in order of arrival. count: their number, 0 if there
 * are none. Does not block. */
TS_API ts_error* ts_notifier_take(ts_notifier* notifier,
                                  uint64_t* tokens,
                                  int64_t capacity,
                                  int64_t* count);

/* Adds a token at once. */
TS_API ts_error* ts_notifier_post(ts_notifier* notifier, uint64_t token);

/* Adds the token once everything enqueued on the stream so far is done. Work enqueued on the stream
 * after this call starts after the token is added, which delays it by about a microsecond. The host
 * does not block. Returns TS_ERROR_CAPTURE while the stream is captured. If the device fails, the
 * token may never arrive; ts_stream_query then returns the error. */
TS_API ts_error* ts_stream_notify(ts_stream stream, ts_notifier* notifier, uint64_t token);

#ifdef __cplusplus
}
#endif

#endif /* TS_NOTIFIER_H_ */
