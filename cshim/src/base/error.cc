#include "base/error.h"

#include <cstring>

namespace ts {
namespace {

// Returned when not even an error can be allocated; ts_error_free knows it.
ts_error& no_memory_for_error() noexcept {
  static ts_error error{TS_ERROR_OUT_OF_MEMORY, nullptr, "make_error"};
  return error;
}

}  // namespace

ts_error* make_error(const char* origin, int32_t code, const char* message) noexcept {
  auto* error = new (std::nothrow) ts_error{code, nullptr, origin};
  if (error == nullptr) return &no_memory_for_error();
  const size_t size = std::strlen(message) + 1;
  error->message.reset(new (std::nothrow) char[size]);
  if (error->message) std::memcpy(error->message.get(), message, size);
  return error;
}

}  // namespace ts

int32_t ts_error_code(const ts_error* error) { return error == nullptr ? TS_OK : error->code; }

const char* ts_error_message(const ts_error* error) {
  if (error == nullptr) return "";
  return error->message ? error->message.get() : "out of memory for the error's text";
}

const char* ts_error_origin(const ts_error* error) { return error == nullptr ? "" : error->origin; }

void ts_error_free(ts_error* error) {
  if (error != &ts::no_memory_for_error()) delete error;
}
