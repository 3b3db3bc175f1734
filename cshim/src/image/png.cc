#include "image/png.h"

#include <png.h>
#include <zlib.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/error.h"

namespace ts::image {
namespace {

constexpr size_t kSignature = 8;
constexpr int32_t kRowsAtOnce = 16;

[[noreturn]] void damaged(const std::string& what) {
  throw Failure(TS_ERROR_DECODE, "damaged PNG: " + what);
}

uint32_t big_endian(const uint8_t* at) {
  return static_cast<uint32_t>(at[0]) << 24 | static_cast<uint32_t>(at[1]) << 16 |
         static_cast<uint32_t>(at[2]) << 8 | at[3];
}

struct Chunk {
  const uint8_t* type;  // four bytes
  const uint8_t* data;
  size_t size;
  bool is(const char* name) const { return std::memcmp(type, name, 4) == 0; }
};

// The chunk that starts at *at, which is moved past it.
Chunk next_chunk(const uint8_t* data, size_t bytes, size_t* at) {
  const size_t left = bytes - *at;
  const size_t size = left < 12 ? 0 : big_endian(data + *at);
  if (left < 12 || size > left - 12) {
    throw Failure(TS_ERROR_DECODE,
                  "truncated PNG: no end chunk in " + std::to_string(bytes) + " bytes");
  }
  const Chunk chunk = {data + *at + 4, data + *at + 8, size};
  const uLong sum = crc32(0, chunk.type, static_cast<uInt>(size + 4));
  if (sum != big_endian(chunk.data + size)) {
    damaged("a wrong checksum in the chunk at byte " + std::to_string(*at));
  }
  *at += size + 12;
  return chunk;
}

int samples(int color_type) {
  switch (color_type) {
    case PNG_COLOR_TYPE_GRAY:
    case PNG_COLOR_TYPE_PALETTE:
      return 1;
    case PNG_COLOR_TYPE_GRAY_ALPHA:
      return 2;
    case PNG_COLOR_TYPE_RGB:
      return 3;
    case PNG_COLOR_TYPE_RGB_ALPHA:
      return 4;
    default:
      return 0;
  }
}

// libpng reports errors by a function that must not return, nor throw across its C frames. It
// jumps, and only across frames of libpng and of the functions below that are marked "confined":
// those own nothing.
struct State {
  png_structp png = nullptr;
  png_infop info = nullptr;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  size_t at = 0;
  std::jmp_buf jump;
  char text[200];

  ~State() { png_destroy_read_struct(&png, &info, nullptr); }
};

[[noreturn]] void fail(png_structp png, png_const_charp text) {
  auto* state = static_cast<State*>(png_get_error_ptr(png));
  std::snprintf(state->text, sizeof state->text, "%s", text);
  std::longjmp(state->jump, 1);
}

// libpng warns about what does not touch the pixels: colour profiles, chunks out of place.
void ignore(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep to, size_t size) {
  auto* state = static_cast<State*>(png_get_io_ptr(png));
  if (size > state->bytes - state->at) png_error(png, "the data ends early");
  std::memcpy(to, state->data + state->at, size);
  state->at += size;
}

bool start(State* state, int* passes) {  // confined
  state->png = png_create_read_struct(PNG_LIBPNG_VER_STRING, state, fail, ignore);
  if (state->png == nullptr) {
    std::snprintf(state->text, sizeof state->text, "libpng does not start");
    return false;
  }
  png_structp png = state->png;
  if (setjmp(state->jump) != 0) return false;
  state->info = png_create_info_struct(png);
  if (state->info == nullptr) png_error(png, "out of memory");
  png_set_read_fn(png, state, read_bytes);
  // png_check has seen to the checksums, and the caller to the number of pixels.
  png_set_crc_action(png, PNG_CRC_QUIET_USE, PNG_CRC_QUIET_USE);
  png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
  png_set_chunk_cache_max(png, 100);
  png_set_chunk_malloc_max(png, 1 << 20);
  // None of these changes a pixel of ours (transparency is dropped), and some would have to be
  // inflated.
  static const png_byte kSkipped[] =
      "bKGD\0cHRM\0eXIf\0gAMA\0hIST\0iCCP\0iTXt\0oFFs\0pCAL\0pHYs\0sBIT\0sCAL\0sPLT\0sRGB\0tEXt\0tI"
      "ME\0tRNS\0zTXt";
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, 0);
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, kSkipped, sizeof kSkipped / 5);
  png_read_info(png, state->info);
  png_set_expand(png);    // palette to RGB, 1, 2 and 4 bits to 8
  png_set_strip_16(png);  // the high byte
  png_set_strip_alpha(png);
  png_set_gray_to_rgb(png);
  *passes = png_set_interlace_handling(png);
  png_read_update_info(png, state->info);
  return true;
}

bool read(State* state, uint8_t* rows, size_t stride, int32_t count) {  // confined
  if (setjmp(state->jump) != 0) return false;
  for (int32_t i = 0; i < count; ++i) {
    png_read_row(state->png, rows + static_cast<size_t>(i) * stride, nullptr);
  }
  return true;
}

}  // namespace

bool is_png(const uint8_t* data, size_t bytes) {
  return bytes >= kSignature && png_sig_cmp(data, 0, kSignature) == 0;
}

ts_image_info png_header(const uint8_t* data, size_t bytes) {
  size_t at = kSignature;
  const Chunk header = next_chunk(data, bytes, &at);
  if (!header.is("IHDR") || header.size != 13) damaged("the first chunk is not a header");
  const uint32_t width = big_endian(header.data);
  const uint32_t height = big_endian(header.data + 4);
  const int depth = header.data[8];
  const int color_type = header.data[9];
  const int channels = samples(color_type);
  const bool palette = color_type == PNG_COLOR_TYPE_PALETTE;
  if (width == 0 || height == 0 || width > PNG_UINT_31_MAX || height > PNG_UINT_31_MAX) {
    damaged("an impossible width or height");
  }
  const bool any_depth = channels == 1;
  if (channels == 0 || !(depth == 8 || (depth == 16 && !palette) ||
                         (any_depth && (depth == 1 || depth == 2 || depth == 4)))) {
    damaged("colour type " + std::to_string(color_type) + " with " + std::to_string(depth) +
            " bits");
  }
  if (header.data[10] != 0 || header.data[11] != 0 || header.data[12] > 1) {
    throw Failure(TS_ERROR_UNSUPPORTED, "PNG: an unknown compression, filter or interlace method");
  }
  ts_image_info info = {};
  info.format = TS_IMAGE_FORMAT_PNG;
  info.width = static_cast<int32_t>(width);
  info.height = static_cast<int32_t>(height);
  info.components = palette ? 3 : channels;
  info.bit_depth = depth;
  info.progressive = header.data[12] == 1;
  return info;
}

void png_check(const uint8_t* data, size_t bytes) {
  const ts_image_info info = png_header(data, bytes);
  const auto bits = static_cast<double>(samples(data[kSignature + 17]) * info.bit_depth);
  double image_data = 0;
  size_t at = kSignature;
  while (true) {
    const Chunk chunk = next_chunk(data, bytes, &at);
    if (chunk.is("IDAT")) image_data += static_cast<double>(chunk.size);
    if (chunk.is("IEND")) break;
  }
  // Deflate makes at most 1032 bytes out of one: a short file cannot ask for the memory of a large
  // image.
  if (image_data * 1032 < bits / 8 * info.width * info.height) {
    damaged("too little image data for " + std::to_string(info.width) + " x " +
            std::to_string(info.height) + " pixels");
  }
}

void PngDecoder::decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink) {
  State state;
  state.data = data;
  state.bytes = bytes;
  const auto check = [&](bool ok) {
    if (!ok) throw Failure(TS_ERROR_DECODE, std::string("PNG: ") + state.text);
  };
  int passes = 0;
  check(start(&state, &passes));
  const size_t stride = png_get_rowbytes(state.png, state.info) + kRowSlack;
  const auto height = static_cast<int32_t>(png_get_image_height(state.png, state.info));
  const size_t left = static_cast<size_t>(box.x0) * 3;
  if (passes > 1) {
    std::vector<uint8_t> image(stride * static_cast<size_t>(height));  // not kept: it may be large
    for (int pass = 0; pass < passes; ++pass) check(read(&state, image.data(), stride, height));
    sink->push(image.data() + static_cast<size_t>(box.y0) * stride + left, stride, box.height());
    return;
  }
  rows_.resize(stride * kRowsAtOnce);
  for (int32_t row = 0; row < box.y1;) {
    const bool wanted = row >= box.y0;
    const int32_t rows = std::min(kRowsAtOnce, (wanted ? box.y1 : box.y0) - row);
    check(read(&state, rows_.data(), stride, rows));
    if (wanted) sink->push(rows_.data() + left, stride, rows);
    row += rows;
  }
}

}  // namespace ts::image
