// Classifies exceptions of the image library. Only the standard library's exceptions arrive here,
// and each is a defect.
#include "base/error.h"

namespace ts {

ts_error* classify(const char* origin, const std::exception& exception) noexcept {
  return ts_error_new(TS_ERROR_INTERNAL, origin, exception.what());
}

}  // namespace ts
