#include "distributed/store.h"

#include <limits>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "base/thread.h"
#include "distributed/broken_pipe.h"

ts_error* ts_store_connect(const char* host, int32_t port, bool serve, const char* prefix,
                           int64_t timeout_nanoseconds, ts_store** store) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(host != nullptr && host[0] != '\0', "host is NULL or empty");
    ts::require(prefix != nullptr, "prefix is NULL");
    ts::require(store != nullptr, "store is NULL");
    ts::require(port > (serve ? -1 : 0) && port <= std::numeric_limits<uint16_t>::max(),
                "port must be 1 to 65535, or 0 for a free one of the server");
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = serve;
    // The members of a group wait for each other later, when their names are known.
    options.waitWorkers = false;
    options.timeout = ts::distributed::checked_timeout(timeout_nanoseconds);
    auto made = std::make_unique<ts_store>();
    const ts::distributed::BrokenPipeBlocked blocked;
    made->store = c10::make_intrusive<c10d::TCPStore>(host, options);
    if (prefix[0] != '\0') {
      made->store = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(made->store));
    }
    *store = made.release();
  });
}

ts_error* ts_store_new_local(int64_t timeout_nanoseconds, ts_store** store) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(store != nullptr, "store is NULL");
    auto made = std::make_unique<ts_store>();
    made->store = c10::make_intrusive<c10d::HashStore>();
    made->store->setTimeout(ts::distributed::checked_timeout(timeout_nanoseconds));
    *store = made.release();
  });
}

void ts_store_free(ts_store* store) { delete store; }

ts_error* ts_store_set(ts_store* store, const char* key, const uint8_t* data, size_t bytes) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(store != nullptr && key != nullptr, "store or key is NULL");
    ts::require(data != nullptr || bytes == 0, "data is NULL");
    store->store->set(key, std::vector<uint8_t>(data, data + bytes));
  });
}

ts_error* ts_store_get(ts_store* store, const char* key, uint8_t* data, size_t capacity,
                       size_t* bytes) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(store != nullptr && key != nullptr, "store or key is NULL");
    ts::require(data != nullptr && bytes != nullptr, "data or bytes is NULL");
    const std::vector<uint8_t> value = store->store->get(key);
    ts::require(value.size() <= capacity, "the value is larger than the capacity");
    std::memcpy(data, value.data(), value.size());
    *bytes = value.size();
  });
}
