#include "image/heif.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "image/heif_check.h"

namespace ts::image {
namespace {

// The part of libheif's C API (1.10 and newer) used here. The types are opaque, except for the
// error and the start of the colour profile, which have not changed.
extern "C" {
struct heif_context;
struct heif_image_handle;
struct heif_image;
struct heif_error {
  int code;
  int subcode;
  const char* message;
};
struct heif_color_profile_nclx {  // more members follow
  uint8_t version;
  int color_primaries;
  int transfer_characteristics;
  int matrix_coefficients;
  uint8_t full_range_flag;
};
}

constexpr int kOk = 0;
constexpr int kUnsupportedFiletype = 3;
constexpr int kUnsupportedFeature = 4;
constexpr int kOutOfMemory = 6;
constexpr int kPluginLoading = 11;
constexpr int kSecurityLimit = 1000;  // a kind of kOutOfMemory without an attempted allocation
constexpr int kColourspaceYCbCr = 0;
constexpr int kColourspaceRgb = 1;
constexpr int kChroma420 = 1;
constexpr int kChromaInterleavedRgb = 10;
constexpr int kChannelY = 0;
constexpr int kChannelCb = 1;
constexpr int kChannelCr = 2;
constexpr int kChannelInterleaved = 10;

// libheif, loaded once for the process, for the first image that needs it.
struct Library {
  Library() {
    void* const library = dlopen("libheif.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    found = true;
    const auto load = [&](const char* name, auto* function) {
      *reinterpret_cast<void**>(function) = dlsym(library, name);
      found = found && *function != nullptr;
    };
    load("heif_context_alloc", &context_alloc);
    load("heif_context_free", &context_free);
    load("heif_context_read_from_memory_without_copy", &read_from_memory);
    load("heif_context_set_max_decoding_threads", &set_max_decoding_threads);
    load("heif_context_get_primary_image_handle", &get_primary_image_handle);
    load("heif_image_handle_release", &handle_release);
    load("heif_image_handle_get_width", &handle_get_width);
    load("heif_image_handle_get_height", &handle_get_height);
    load("heif_image_handle_get_luma_bits_per_pixel", &handle_get_luma_bits);
    load("heif_image_handle_has_alpha_channel", &handle_has_alpha);
    load("heif_decode_image", &decode_image);
    load("heif_image_get_width", &image_get_width);
    load("heif_image_get_height", &image_get_height);
    load("heif_image_get_plane_readonly", &image_get_plane);
    load("heif_image_handle_get_nclx_color_profile", &handle_get_profile);
    load("heif_nclx_color_profile_free", &profile_free);
    load("heif_image_release", &image_release);
  }

  bool found = false;
  heif_context* (*context_alloc)() = nullptr;
  void (*context_free)(heif_context*) = nullptr;
  heif_error (*read_from_memory)(heif_context*, const void*, size_t, const void*) = nullptr;
  void (*set_max_decoding_threads)(heif_context*, int) = nullptr;
  heif_error (*get_primary_image_handle)(heif_context*, heif_image_handle**) = nullptr;
  void (*handle_release)(const heif_image_handle*) = nullptr;
  int (*handle_get_width)(const heif_image_handle*) = nullptr;
  int (*handle_get_height)(const heif_image_handle*) = nullptr;
  int (*handle_get_luma_bits)(const heif_image_handle*) = nullptr;
  int (*handle_has_alpha)(const heif_image_handle*) = nullptr;
  heif_error (*decode_image)(const heif_image_handle*, heif_image**, int, int,
                             const void*) = nullptr;
  int (*image_get_width)(const heif_image*, int) = nullptr;
  int (*image_get_height)(const heif_image*, int) = nullptr;
  const uint8_t* (*image_get_plane)(const heif_image*, int, int*) = nullptr;
  heif_error (*handle_get_profile)(const heif_image_handle*, heif_color_profile_nclx**) = nullptr;
  void (*profile_free)(heif_color_profile_nclx*) = nullptr;
  void (*image_release)(const heif_image*) = nullptr;
};

const Library& library() {
  static const Library loaded;
  if (!loaded.found) {
    throw Failure(TS_ERROR_UNSUPPORTED,
                  "a HEIC or AVIF, which needs libheif: install libheif1 (Debian, Ubuntu) or "
                  "libheif (elsewhere) where the program runs");
  }
  return loaded;
}

void check(const heif_error& error) {
  if (error.code == kOk) return;
  if (error.code == kOutOfMemory && error.subcode != kSecurityLimit) throw std::bad_alloc();
  std::string message =
      "libheif: " + std::string(error.message == nullptr ? "an error" : error.message);
  if (error.code == kUnsupportedFiletype || error.code == kUnsupportedFeature ||
      error.code == kPluginLoading) {
    message +=
        " (decoders may be packages of their own: libheif-plugin-libde265 for HEIC, "
        "libheif-plugin-dav1d for AVIF)";
    throw Failure(TS_ERROR_UNSUPPORTED, message);
  }
  throw Failure(error.code == kOutOfMemory ? TS_ERROR_UNSUPPORTED : TS_ERROR_DECODE, message);
}

// A file that libheif has read, except for its pixels.
class File {
 public:
  File(const uint8_t* data, size_t bytes, int64_t max_pixels)
      : lib(library()),
        kind(heif_check(data, bytes, max_pixels)),
        context_(lib.context_alloc(), lib.context_free),
        handle_(nullptr, lib.handle_release) {
    if (context_ == nullptr) throw std::bad_alloc();
    lib.set_max_decoding_threads(context_.get(), 0);
    check(lib.read_from_memory(context_.get(), data, bytes, nullptr));
    heif_image_handle* handle = nullptr;
    check(lib.get_primary_image_handle(context_.get(), &handle));
    handle_.reset(handle);
    const int32_t width = lib.handle_get_width(handle);
    const int32_t height = lib.handle_get_height(handle);
    if (width < 1 || height < 1) {
      throw Failure(TS_ERROR_DECODE, "damaged HEIF: an impossible width or height");
    }
    if (int64_t{width} * height > max_pixels) {
      throw Failure(TS_ERROR_UNSUPPORTED, "HEIF: an image of " + std::to_string(width) + " x " +
                                              std::to_string(height) + " is over the limit of " +
                                              std::to_string(max_pixels) + " pixels");
    }
  }

  const heif_image_handle* handle() const { return handle_.get(); }

  const Library& lib;
  const HeifKind kind;

 private:
  std::unique_ptr<heif_context, void (*)(heif_context*)> context_;
  std::unique_ptr<heif_image_handle, void (*)(const heif_image_handle*)> handle_;
};

using Image = std::unique_ptr<heif_image, void (*)(const heif_image*)>;

Image decoded(const File& file, int colourspace, int chroma) {
  heif_image* image = nullptr;
  check(file.lib.decode_image(file.handle(), &image, colourspace, chroma, nullptr));
  return Image(image, file.lib.image_release);
}

struct Plane {
  const uint8_t* data;
  int32_t width, height;
  int stride;
  const uint8_t* row(int32_t y) const { return data + static_cast<ptrdiff_t>(y) * stride; }
};

// Returns a plane with all columns and rows before right and bottom. Throws Failure if it is
// smaller. bytes: of a pixel.
Plane plane_of(const File& file, const heif_image* image, int channel, int32_t right,
               int32_t bottom, int bytes) {
  Plane plane = {};
  plane.data = file.lib.image_get_plane(image, channel, &plane.stride);
  plane.width = file.lib.image_get_width(image, channel);
  plane.height = file.lib.image_get_height(image, channel);
  if (plane.data == nullptr || plane.width < right || plane.height < bottom ||
      plane.stride < static_cast<int64_t>(plane.width) * bytes) {
    throw Failure(TS_ERROR_DECODE, "damaged HEIF: less pixels than the header says");
  }
  return plane;
}

// Converts 8-bit YCbCr to RGB, by BT.601 with full range.
void convert(int32_t y, int32_t cb, int32_t cr, uint8_t* rgb) {
  const auto clamped = [](int32_t value) {
    return static_cast<uint8_t>(std::clamp(value >> 16, 0, 255));
  };
  const int32_t grey = (y << 16) + (1 << 15);
  rgb[0] = clamped(grey + (cr - 128) * 91881);                       // 1.402
  rgb[1] = clamped(grey - (cb - 128) * 22554 - (cr - 128) * 46802);  // 0.344136 and 0.714136
  rgb[2] = clamped(grey + (cb - 128) * 116130);                      // 1.772
}

// Reports whether libheif's YCbCr is the file's: 8-bit BT.601 with full range, as in most AVIF
// files. Versions of libheif differ in their conversion of other YCbCr.
bool is_plain(const File& file) {
  heif_color_profile_nclx* profile = nullptr;
  if (file.lib.handle_get_profile(file.handle(), &profile).code != kOk || profile == nullptr) {
    return false;
  }
  const bool bt601 = profile->matrix_coefficients == 5 || profile->matrix_coefficients == 6;
  const bool full_range = profile->full_range_flag != 0;
  file.lib.profile_free(profile);
  return bt601 && full_range && file.lib.handle_get_luma_bits(file.handle()) == 8;
}

// Converts an image whose colour has half the columns and rows. A pixel's colour is interpolated
// between its four neighbours (9, 3, 3 and 1 sixteenths), as in libavif.
void push_420(const File& file, const heif_image* image, const Box& box, Resizer* sink) {
  const int32_t half_right = (box.x1 + 1) / 2;
  const int32_t half_bottom = (box.y1 + 1) / 2;
  const Plane luma = plane_of(file, image, kChannelY, box.x1, box.y1, 1);
  const Plane blue = plane_of(file, image, kChannelCb, half_right, half_bottom, 1);
  const Plane red = plane_of(file, image, kChannelCr, half_right, half_bottom, 1);
  const int32_t width = std::min(blue.width, red.width);
  const int32_t height = std::min(blue.height, red.height);
  const auto neighbour = [](int32_t at, int32_t end) {
    return std::clamp(at % 2 == 0 ? at / 2 - 1 : at / 2 + 1, 0, end - 1);
  };
  const size_t row_bytes = static_cast<size_t>(box.width()) * 3;
  std::vector<uint8_t> row(row_bytes + kRowSlack);
  for (int32_t y = box.y0; y < box.y1; ++y) {
    const int32_t far_y = neighbour(y, height);
    const auto interpolated = [&](const Plane& plane, int32_t x) {
      const int32_t far_x = neighbour(x, width);
      const uint8_t* const near = plane.row(y / 2);
      const uint8_t* const far = plane.row(far_y);
      return (9 * near[x / 2] + 3 * near[far_x] + 3 * far[x / 2] + far[far_x] + 8) >> 4;
    };
    uint8_t* to = row.data();
    for (int32_t x = box.x0; x < box.x1; ++x, to += 3) {
      convert(luma.row(y)[x], interpolated(blue, x), interpolated(red, x), to);
    }
    sink->push(row.data(), row_bytes, 1);
  }
}

}  // namespace

bool is_heif(const uint8_t* data, size_t bytes) {
  if (bytes < 12 || std::memcmp(data + 4, "ftyp", 4) != 0) return false;
  for (const char* brand : {"heic", "heix", "heim", "heis", "mif1", "avif"}) {
    if (std::memcmp(data + 8, brand, 4) == 0) return true;
  }
  return false;
}

ts_image_info heif_header(const uint8_t* data, size_t bytes, int64_t max_pixels) {
  const File file(data, bytes, max_pixels);
  ts_image_info info = {};
  const bool avif = std::memcmp(data + 8, "avif", 4) == 0;
  info.format = avif ? TS_IMAGE_FORMAT_AVIF : TS_IMAGE_FORMAT_HEIC;
  info.width = file.lib.handle_get_width(file.handle());
  info.height = file.lib.handle_get_height(file.handle());
  info.components = file.lib.handle_has_alpha(file.handle()) != 0 ? 4 : 3;
  info.bit_depth = file.lib.handle_get_luma_bits(file.handle());
  return info;
}

void heif_decode(const uint8_t* data, size_t bytes, int64_t max_pixels, const Box& box,
                 Resizer* sink) {
  const File file(data, bytes, max_pixels);
  if (file.kind.av1_420 && is_plain(file)) {
    push_420(file, decoded(file, kColourspaceYCbCr, kChroma420).get(), box, sink);
    return;
  }
  const Image image = decoded(file, kColourspaceRgb, kChromaInterleavedRgb);
  const Plane pixels = plane_of(file, image.get(), kChannelInterleaved, box.x1, box.y1, 3);
  // A copy, because libheif's rows need not have the slack that the sink reads.
  const size_t row_bytes = static_cast<size_t>(box.width()) * 3;
  std::vector<uint8_t> row(row_bytes + kRowSlack);
  for (int32_t y = box.y0; y < box.y1; ++y) {
    std::memcpy(row.data(), pixels.row(y) + static_cast<size_t>(box.x0) * 3, row_bytes);
    sink->push(row.data(), row_bytes, 1);
  }
}

}  // namespace ts::image
