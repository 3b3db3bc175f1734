// What the library does with LibTorch's exceptions (src/base/exception.cc), for tests that are
// built without LibTorch: any other exception is a defect.
#include "base/error.h"

namespace ts {

ts_error* classify(const char* origin, const std::exception& exception) noexcept {
  return make_error(origin, TS_ERROR_INTERNAL, exception.what());
}

}  // namespace ts
