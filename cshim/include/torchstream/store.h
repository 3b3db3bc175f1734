/* Stores: tables that the processes of a job share. */
#ifndef TS_STORE_H_
#define TS_STORE_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A table of keys and values that the processes of a job share: LibTorch's TCPStore, or one inside
 * of the process. Any number of threads may use it at once. */
typedef struct ts_store ts_store;

/* Connects with the store at host:port. serve: also runs the server, which ends with the store;
 * port 0 then stands for a free port. Keys are put behind `prefix` and a slash, unless it is empty.
 * Blocks until the server answers, for the timeout at most, which also bounds ts_store_get. */
TS_API ts_error* ts_store_connect(const char* host,
                                  int32_t port,
                                  bool serve,
                                  const char* prefix,
                                  int64_t timeout_nanoseconds,
                                  ts_store** store);

/* Makes a store inside of the process. */
TS_API ts_error* ts_store_new_local(int64_t timeout_nanoseconds, ts_store** store);

/* Frees a store. Groups that were made with it keep what they need of it. */
TS_API void ts_store_free(ts_store* store);
TS_API ts_error* ts_store_set(ts_store* store, const char* key, const uint8_t* data, size_t bytes);

/* Copies the value of the key, and blocks until there is one. bytes: its size.
 * TS_ERROR_INVALID_ARGUMENT if it is larger than the capacity. */
TS_API ts_error* ts_store_get(ts_store* store,
                              const char* key,
                              uint8_t* data,
                              size_t capacity,
                              size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* TS_STORE_H_ */
