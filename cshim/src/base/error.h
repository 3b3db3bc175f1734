// Errors: the exception that the library throws internally, and guard, the only place that turns
// exceptions into the errors that functions return.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "torchstream_image.h"

namespace ts {

// The exception thrown by the library's own code.
class Failure : public std::exception {
 public:
  Failure(int32_t code, std::string message, int64_t offset = -1)
      : code_(code), message_(std::move(message)), offset_(offset) {}
  int32_t code() const noexcept { return code_; }
  int64_t offset() const noexcept { return offset_; }  // ts_error_offset
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int32_t code_;
  std::string message_;
  int64_t offset_;
};

// Returns the error for an exception that is not a Failure. Each library has its own version: the
// one with LibTorch knows LibTorch's exceptions (base/exception.cc), the image library does not
// (image/exception.cc).
ts_error* classify(const char* origin, const std::exception& exception) noexcept;

inline void require(bool condition, const char* message) {
  if (!condition) throw Failure(TS_ERROR_INVALID_ARGUMENT, message);
}

// Throws a Failure with the error's contents. Takes ownership of the error.
[[noreturn]] inline void throw_error(ts_error* error) {
  const std::unique_ptr<ts_error, decltype(&ts_error_free)> owned(error, &ts_error_free);
  throw Failure(ts_error_code(error), ts_error_message(error), ts_error_offset(error));
}

// The size of a header's struct before it grew.
template <typename Sized>
inline constexpr size_t kSizeBefore = sizeof(Sized);
template <>
inline constexpr size_t kSizeBefore<ts_image_geometry> = offsetof(ts_image_geometry, interpolation);

// Checks the size of a header's struct that may grow. The caller knows all of it, more than this
// library does, or the struct before it grew.
template <typename Sized>
void require_size(const Sized* sized, const char* name) {
  if (sized == nullptr) throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " is NULL");
  if (sized->size < sizeof(Sized) && sized->size != kSizeBefore<Sized>) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  std::string(name) + "->size must be sizeof(*" + name + ") before the call");
  }
}

// Returns a copy of such a struct, after require_size. Members unknown to the caller are 0.
template <typename Sized>
Sized known(const Sized* sized) {
  Sized copy = {};
  std::memcpy(&copy, sized, std::min(sized->size, sizeof copy));
  return copy;
}

// Fills in such a struct, after require_size. It must not have grown.
template <typename Sized>
void fill(Sized* sized, Sized value) {
  static_assert(kSizeBefore<Sized> == sizeof(Sized), "fill writes all members");
  value.size = sized->size;
  *sized = value;
}

// The boundary between C++ and C. Every exported function that can fail is one call of guard:
// ts::guard(__func__, [&] { ... }).
template <typename Body>
ts_error* guard(const char* origin, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return nullptr;
  } catch (const Failure& failure) {
    ts_error* error = ts_error_new(failure.code(), origin, failure.what());
    if (failure.offset() >= 0) ts_error_set_offset(error, failure.offset());
    return error;
  } catch (const std::bad_alloc&) {
    return ts_error_new(TS_ERROR_OUT_OF_MEMORY, origin, "out of host memory");
  } catch (const std::exception& exception) {
    return classify(origin, exception);
  } catch (...) {
    return ts_error_new(TS_ERROR_INTERNAL, origin, "an exception of unknown type");
  }
}

}  // namespace ts
