// Errors of the shim: what is thrown inside, what is returned outside, and the one place where one
// becomes the other.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "torchstream.h"

struct ts_error {
  int32_t code;
  std::unique_ptr<char[]> message;  // NULL: there was no memory for it
  const char* origin;               // a function name: static storage
};

namespace ts {

// What the shim's own code throws.
class Failure : public std::exception {
 public:
  Failure(int32_t code, std::string message) : code_(code), message_(std::move(message)) {}
  int32_t code() const noexcept { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int32_t code_;
  std::string message_;
};

// Builds the error to return. Falls back to a static out-of-memory error when there is no memory
// for one.
ts_error* make_error(const char* origin, int32_t code, const char* message) noexcept;

// The code and text of an exception that is not a Failure: in the library it knows LibTorch's
// exceptions (exception.cc), in the image tests, which are built without LibTorch, it does not
// (test/image/exception.cc).
ts_error* classify(const char* origin, const std::exception& exception) noexcept;

inline void require(bool condition, const char* message) {
  if (!condition) throw Failure(TS_ERROR_INVALID_ARGUMENT, message);
}

// The boundary between C++ and C. Every exported function that can fail is one call of it:
// ts::guard(__func__, [&] { ... }).
template <typename Body>
ts_error* guard(const char* origin, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return nullptr;
  } catch (const Failure& failure) {
    return make_error(origin, failure.code(), failure.what());
  } catch (const std::bad_alloc&) {
    return make_error(origin, TS_ERROR_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& exception) {
    return classify(origin, exception);
  } catch (...) {
    return make_error(origin, TS_ERROR_INTERNAL, "an exception of unknown type");
  }
}

}  // namespace ts
