#include "base/error.h"

#include <cstring>
#include <memory>
#include <new>

struct ts_error {
  int32_t code;
  int64_t offset;
  std::unique_ptr<char[]> message;  // NULL if there was no memory for the text
  const char* origin;               // a function name in static storage
};

namespace ts {
namespace {

// The error for a lack of memory for an error. ts_error_free does not free it.
ts_error& no_memory_for_error() noexcept {
  static ts_error error{TS_ERROR_OUT_OF_MEMORY, -1, nullptr, "ts_error_new"};
  return error;
}

}  // namespace
}  // namespace ts

ts_error* ts_error_new(int32_t code, const char* origin, const char* message) {
  auto* error = new (std::nothrow) ts_error{code, -1, nullptr, origin};
  if (error == nullptr) return &ts::no_memory_for_error();
  const size_t size = std::strlen(message) + 1;
  error->message.reset(new (std::nothrow) char[size]);
  if (error->message) std::memcpy(error->message.get(), message, size);
  return error;
}

int32_t ts_error_code(const ts_error* error) {
  return error == nullptr ? TS_ERROR_NONE : error->code;
}

const char* ts_error_message(const ts_error* error) {
  if (error == nullptr) return "";
  return error->message ? error->message.get() : "out of memory for the error's text";
}

const char* ts_error_origin(const ts_error* error) { return error == nullptr ? "" : error->origin; }

int64_t ts_error_offset(const ts_error* error) { return error == nullptr ? -1 : error->offset; }

void ts_error_set_offset(ts_error* error, int64_t offset) {
  // All threads share the error for a lack of memory.
  if (error != nullptr && error != &ts::no_memory_for_error()) error->offset = offset;
}

void ts_error_free(ts_error* error) {
  if (error != &ts::no_memory_for_error()) delete error;
}
