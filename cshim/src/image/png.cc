#include "image/png.h"

#include <png.h>
#include <zlib.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/error.h"
#include "image/damage.h"

namespace ts::image {
namespace {

constexpr size_t kSignature = 8;
constexpr int32_t kRowsAtOnce = 16;

[[noreturn]] void damaged(const std::string& what, size_t at) {
  throw_damage("damaged PNG: " + what, at);
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

// Reads the chunk that starts at *at, and moves *at past the chunk.
Chunk next_chunk(const uint8_t* data, size_t bytes, size_t* at) {
  const size_t left = bytes - *at;
  const size_t size = left < 12 ? 0 : big_endian(data + *at);
  if (left < 12 || size > left - 12) {
    throw_damage("truncated PNG: no end chunk up to the file's end", bytes);
  }
  const Chunk chunk = {data + *at + 4, data + *at + 8, size};
  const uLong sum = crc32(0, chunk.type, static_cast<uInt>(size + 4));
  if (sum != big_endian(chunk.data + size)) {
    damaged("a wrong checksum in the chunk", *at);
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

// A chunk of a copy made by essentials.
struct Copied {
  size_t to;    // its byte in the copy
  size_t from;  // its byte in the file
};

}  // namespace

// libpng reports an error through a function that must neither return nor throw across libpng's C
// frames, so that function jumps. The jump crosses only frames of libpng and of the functions
// marked "confined" below, which own nothing.
struct PngState {
  png_structp png = nullptr;
  png_infop info = nullptr;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  size_t at = 0;
  std::vector<Copied> copied;  // if data is a copy
  size_t file_bytes = 0;
  std::jmp_buf jump;
  char text[200];
  bool whole = false;  // decodes all rows, because the verdict needs them
  int64_t rows = 0;    // if whole: the rows of all passes that were read and unfiltered

  // Returns how far libpng has read the file.
  size_t place() const {
    const auto next = std::upper_bound(copied.begin(), copied.end(), at,
                                       [](size_t byte, const Copied& c) { return byte < c.to; });
    // No copy, or in the header, which has the same position.
    if (next == copied.begin()) return at;
    return std::min((next - 1)->from + (at - (next - 1)->to), file_bytes);
  }

  ~PngState() { png_destroy_read_struct(&png, &info, nullptr); }
};

namespace {

[[noreturn]] void fail(png_structp png, png_const_charp text) {
  auto* state = static_cast<PngState*>(png_get_error_ptr(png));
  std::snprintf(state->text, sizeof state->text, "%s", text);
  std::longjmp(state->jump, 1);
}

// libpng's warnings do not concern the pixels: they are about colour profiles and misplaced chunks.
void ignore(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep to, size_t size) {
  auto* state = static_cast<PngState*>(png_get_io_ptr(png));
  if (size > state->bytes - state->at) png_error(png, "the data ends early");
  std::memcpy(to, state->data + state->at, size);
  state->at += size;
}

// Counts a row. libpng calls this function before it reads the data after the row, so a later error
// at the end of the image data does not concern the row.
void note_row(png_structp png, png_row_infop, png_bytep) {
  ++static_cast<PngState*>(png_get_io_ptr(png))->rows;
}

bool start(PngState* state, int* passes) {  // confined
  state->png = png_create_read_struct(PNG_LIBPNG_VER_STRING, state, fail, ignore);
  if (state->png == nullptr) {
    std::snprintf(state->text, sizeof state->text, "libpng cannot start");
    return false;
  }
  png_structp png = state->png;
  if (setjmp(state->jump) != 0) return false;
  state->info = png_create_info_struct(png);
  if (state->info == nullptr) png_error(png, "out of memory");
  png_set_read_fn(png, state, read_bytes);
  // png_check has verified the checksums, and the caller has checked the number of pixels.
  png_set_crc_action(png, PNG_CRC_QUIET_USE, PNG_CRC_QUIET_USE);
  png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
  png_set_chunk_cache_max(png, 100);
  png_set_chunk_malloc_max(png, 1 << 20);
  // These chunks change no pixel of the result, because transparency is dropped, and some would
  // have to be inflated.
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
  if (state->whole) png_set_read_user_transform_fn(png, note_row);
  png_read_update_info(png, state->info);
  return true;
}

bool read(PngState* state, uint8_t* rows, size_t stride, int32_t count) {  // confined
  if (setjmp(state->jump) != 0) return false;
  for (int32_t i = 0; i < count; ++i) {
    png_read_row(state->png, rows + static_cast<size_t>(i) * stride, nullptr);
  }
  return true;
}

// Returns the number of rows of all passes.
int64_t stored_rows(int64_t width, int64_t height, int passes) {
  if (passes == 1) return height;
  int64_t rows = 0;
  for (int pass = 0; pass < passes; ++pass) {
    if (PNG_PASS_COLS(width, pass) > 0) rows += PNG_PASS_ROWS(height, pass);
  }
  return rows;
}

// Reports whether a chunk's name consists of letters. Otherwise the bytes are not a chunk.
bool named(const uint8_t* type) {
  return std::all_of(type, type + 4,
                     [](uint8_t c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); });
}

void append_chunk(std::vector<uint8_t>* to, const uint8_t* type, const uint8_t* data, size_t size) {
  for (int shift = 24; shift >= 0; shift -= 8) to->push_back(static_cast<uint8_t>(size >> shift));
  to->insert(to->end(), type, type + 4);
  if (size > 0) to->insert(to->end(), data, data + size);
  to->insert(to->end(), 4, 0);  // a checksum that nothing verifies
}

// Returns a copy of the file with only its header, the last palette before the image data, the
// image data up to the first other chunk, and an end chunk. Sets *image_data to the number of bytes
// of image data, and *copied to the positions of the chunks. Throws Failure for damage to another
// critical chunk.
std::vector<uint8_t> essentials(const uint8_t* data, size_t bytes, double* image_data,
                                std::vector<Copied>* copied) {
  std::vector<uint8_t> out(data, data + kSignature);
  append_chunk(&out, data + kSignature + 4, data + kSignature + 8, 13);
  std::vector<uint8_t> palette;
  size_t palette_at = 0;
  *image_data = 0;
  size_t at = kSignature + 12 + 13;
  while (at <= bytes && bytes - at >= 8) {
    const size_t left = bytes - at - 8;
    const size_t promised = big_endian(data + at);
    const Chunk chunk = {data + at + 4, data + at + 8, std::min(promised, left)};
    if (!named(chunk.type)) break;
    if (chunk.is("IDAT")) {
      if (*image_data == 0 && !palette.empty()) {
        copied->push_back({out.size(), palette_at});
        append_chunk(&out, reinterpret_cast<const uint8_t*>("PLTE"), palette.data(),
                     palette.size());
      }
      *image_data += static_cast<double>(chunk.size);
      copied->push_back({out.size(), at});
      append_chunk(&out, chunk.type, chunk.data, chunk.size);
    } else if (*image_data > 0 || promised > left) {
      break;
    } else if ((chunk.type[0] & 0x20) == 0) {  // critical
      const size_t chunk_at = at;
      next_chunk(data, bytes, &at);
      if (chunk.is("PLTE")) {
        palette_at = chunk_at;
        palette.assign(chunk.data, chunk.data + std::min<size_t>(chunk.size / 3 * 3, 768));
      }
      continue;
    }
    if (promised > left || left - promised < 4) break;
    at += 12 + promised;
  }
  append_chunk(&out, reinterpret_cast<const uint8_t*>("IEND"), nullptr, 0);
  return out;
}

// Throws Failure if image_data bytes are too few for the image. bytes: the file's size.
void check_enough(const ts_image_info& info, int color_type, double image_data, size_t bytes) {
  // Deflate expands a byte to at most 1032 bytes, so a short file cannot demand the memory of a
  // large image.
  const auto bits = static_cast<double>(samples(color_type) * info.bit_depth);
  if (image_data * 1032 < bits / 8 * info.width * info.height) {
    damaged("too little image data for " + std::to_string(info.width) + " x " +
                std::to_string(info.height) + " pixels",
            bytes);
  }
}

}  // namespace

bool is_png(const uint8_t* data, size_t bytes) {
  return bytes >= kSignature && png_sig_cmp(data, 0, kSignature) == 0;
}

ts_image_info png_header(const uint8_t* data, size_t bytes) {
  size_t at = kSignature;
  const Chunk header = next_chunk(data, bytes, &at);
  if (!header.is("IHDR") || header.size != 13) {
    damaged("the first chunk is not a header", kSignature);
  }
  const uint32_t width = big_endian(header.data);
  const uint32_t height = big_endian(header.data + 4);
  const int depth = header.data[8];
  const int color_type = header.data[9];
  const int channels = samples(color_type);
  const bool palette = color_type == PNG_COLOR_TYPE_PALETTE;
  if (width == 0 || height == 0 || width > PNG_UINT_31_MAX || height > PNG_UINT_31_MAX) {
    damaged("an impossible width or height", kSignature);
  }
  const bool any_depth = channels == 1;
  if (channels == 0 || !(depth == 8 || (depth == 16 && !palette) ||
                         (any_depth && (depth == 1 || depth == 2 || depth == 4)))) {
    damaged(
        "colour type " + std::to_string(color_type) + " with " + std::to_string(depth) + " bits",
        kSignature);
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
  double image_data = 0;
  size_t at = kSignature;
  while (true) {
    const Chunk chunk = next_chunk(data, bytes, &at);
    if (chunk.is("IDAT")) image_data += static_cast<double>(chunk.size);
    if (chunk.is("IEND")) break;
  }
  check_enough(info, data[kSignature + 17], image_data, bytes);
}

void PngDecoder::decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink) {
  PngState state;
  state.data = data;
  state.bytes = bytes;
  read_rows(&state, box, /*partial=*/false, sink);
}

void PngDecoder::decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                                Resizer* sink) {
  const ts_image_info info = png_header(data, bytes);
  double image_data = 0;
  PngState state;
  state.file_bytes = bytes;
  const std::vector<uint8_t> file = essentials(data, bytes, &image_data, &state.copied);
  // Even a part of an interlaced image needs the memory of the whole.
  if (!partial || info.progressive || image_data == 0) {
    check_enough(info, data[kSignature + 17], image_data, bytes);
  }
  state.data = file.data();
  state.bytes = file.size();
  sink->restart();
  state.whole = true;
  read_rows(&state, box, partial, sink);
}

// Reads the rows of the box, or all rows if state->whole. In a whole image, errors after the last
// row are ignored. With `partial`, all errors after the headers are ignored, and missing samples
// are zero.
void PngDecoder::read_rows(PngState* state, const Box& box, bool partial, Resizer* sink) {
  const bool whole = state->whole;
  int passes = 0;
  int64_t expected = 0;
  const auto check = [&](bool ok) {
    if (!ok && !(whole && expected > 0 && (partial || state->rows == expected))) {
      throw_damage(std::string("PNG: ") + state->text, state->place());
    }
    return ok;
  };
  check(start(state, &passes));
  const size_t stride = png_get_rowbytes(state->png, state->info) + kRowSlack;
  const auto height = static_cast<int32_t>(png_get_image_height(state->png, state->info));
  expected = stored_rows(png_get_image_width(state->png, state->info), height, passes);
  const size_t left = static_cast<size_t>(box.x0) * 3;
  png_colorp palette = nullptr;
  int colours = 0;
  png_get_PLTE(state->png, state->info, &palette, &colours);
  const auto clear = [&](std::vector<uint8_t>* rows) {
    std::fill(rows->begin(), rows->end(), uint8_t{0});
    if (state->data[kSignature + 17] != PNG_COLOR_TYPE_PALETTE || colours == 0) return;
    for (size_t at = 0; at + stride <= rows->size(); at += stride) {
      for (size_t i = at; i + 3 <= at + stride - kRowSlack; i += 3) {
        (*rows)[i] = palette[0].red;
        (*rows)[i + 1] = palette[0].green;
        (*rows)[i + 2] = palette[0].blue;
      }
    }
  };
  if (passes > 1) {
    // Not a member like rows_, because it may be large.
    std::vector<uint8_t> image(stride * static_cast<size_t>(height));
    if (whole) clear(&image);
    for (int pass = 0; pass < passes; ++pass) {
      if (!check(read(state, image.data(), stride, height))) break;
    }
    sink->push(image.data() + static_cast<size_t>(box.y0) * stride + left, stride, box.height());
    return;
  }
  rows_.resize(stride * kRowsAtOnce);
  const int32_t end = whole ? height : box.y1;
  bool more = true;
  for (int32_t row = 0; row < end;) {
    const bool wanted = row >= box.y0 && row < box.y1;
    const int32_t until = row < box.y0 ? box.y0 : wanted ? box.y1 : end;
    const int32_t rows = std::min(kRowsAtOnce, until - row);
    if (whole) clear(&rows_);
    if (more) more = check(read(state, rows_.data(), stride, rows));
    if (wanted) sink->push(rows_.data() + left, stride, rows);
    row += rows;
  }
}

}  // namespace ts::image
