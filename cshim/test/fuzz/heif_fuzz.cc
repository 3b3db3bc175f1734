// libFuzzer: the check of HEIC and AVIF files, the only part of reading them that is ours. A file
// that passes with a limit of few pixels passes with a limit of more.
#include "base/error.h"
#include "fuzz.h"
#include "image/heif_check.h"

namespace {

bool passes(const fuzz::Bytes& file, int64_t max_pixels) {
  try {
    ts::image::heif_check(file.data(), file.size(), max_pixels);
  } catch (const ts::Failure& failure) {
    const int32_t code = failure.code();
    fuzz::demand(code == TS_ERROR_DECODE || code == TS_ERROR_UNSUPPORTED);
    return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Bytes exact(data, data + size);
  const bool few = passes(exact, 1 << 12);
  const bool many = passes(exact, int64_t{1} << 40);
  fuzz::demand(!few || many);
  return 0;
}
