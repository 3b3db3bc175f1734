/* Stores: key-value tables that the processes of a job share. */
#ifndef TS_STORE_H_
#define TS_STORE_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A key-value table that the processes of a job share: LibTorch's TCPStore, or a table inside the
 * process. Any number of threads may use it at once. */
typedef struct ts_store ts_store;

/* Connects to the store at host:port. serve: also runs the server, until the store is freed; port 0
 * then chooses a free port. prefix: if not empty, it and a slash precede every key. Blocks until
 * the server answers, at most for the timeout. The timeout also limits ts_store_get. */
TS_API ts_error* ts_store_connect(const char* host,
                                  int32_t port,
                                  bool serve,
                                  const char* prefix,
                                  int64_t timeout_nanoseconds,
                                  ts_store** store);

/* Makes a store inside the process. */
TS_API ts_error* ts_store_new_local(int64_t timeout_nanoseconds, ts_store** store);

/* Frees a store. Groups made with it keep the parts that they need. */
TS_API void ts_store_free(ts_store* store);
TS_API ts_error* ts_store_set(ts_store* store, const char* key, const uint8_t* data, size_t bytes);

/* Copies the key's value, and blocks until there is one. bytes: the value's size. Returns
 * TS_ERROR_INVALID_ARGUMENT if it exceeds the capacity. */
TS_API ts_error* ts_store_get(ts_store* store,
                              const char* key,
                              uint8_t* data,
                              size_t capacity,
                              size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* TS_STORE_H_ */
