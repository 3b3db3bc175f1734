#include "image/heif.h"

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "image/heif_check.h"

namespace ts::image {
namespace {

// What is used of libheif's C API (1.10 and newer). All types but heif_error are opaque, and
// heif_error has not changed since 1.0.
extern "C" {
struct heif_context;
struct heif_image_handle;
struct heif_image;
struct heif_error {
  int code;
  int subcode;
  const char* message;
};
}

constexpr int kOk = 0;
constexpr int kUnsupportedFiletype = 3;
constexpr int kUnsupportedFeature = 4;
constexpr int kOutOfMemory = 6;
constexpr int kPluginLoading = 11;
constexpr int kSecurityLimit = 1000;  // a kind of kOutOfMemory, without any memory asked for
constexpr int kColourspaceRgb = 1;
constexpr int kChromaInterleavedRgb = 10;
constexpr int kChannelInterleaved = 10;

// libheif, loaded once for the process, when the first image needs it.
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

// A file that libheif has read up to its pixels.
class File {
 public:
  File(const uint8_t* data, size_t bytes, int64_t max_pixels)
      : lib(library()),
        context_((heif_check(data, bytes, max_pixels), lib.context_alloc()), lib.context_free),
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

 private:
  std::unique_ptr<heif_context, void (*)(heif_context*)> context_;
  std::unique_ptr<heif_image_handle, void (*)(const heif_image_handle*)> handle_;
};

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
  heif_image* decoded = nullptr;
  check(file.lib.decode_image(file.handle(), &decoded, kColourspaceRgb, kChromaInterleavedRgb,
                              nullptr));
  const std::unique_ptr<heif_image, void (*)(const heif_image*)> image(decoded,
                                                                       file.lib.image_release);
  int stride = 0;
  const uint8_t* const pixels = file.lib.image_get_plane(image.get(), kChannelInterleaved, &stride);
  if (pixels == nullptr || file.lib.image_get_width(image.get(), kChannelInterleaved) < box.x1 ||
      file.lib.image_get_height(image.get(), kChannelInterleaved) < box.y1 || stride < 3 * box.x1) {
    throw Failure(TS_ERROR_DECODE, "damaged HEIF: less pixels than the header says");
  }
  // A copy, because libheif's rows need not have the slack that the sink reads.
  const size_t row_bytes = static_cast<size_t>(box.width()) * 3;
  std::vector<uint8_t> row(row_bytes + kRowSlack);
  for (int32_t y = box.y0; y < box.y1; ++y) {
    std::memcpy(row.data(),
                pixels + static_cast<size_t>(y) * static_cast<size_t>(stride) +
                    static_cast<size_t>(box.x0) * 3,
                row_bytes);
    sink->push(row.data(), row_bytes, 1);
  }
}

}  // namespace ts::image
