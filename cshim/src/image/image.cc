// Exports the image functions. They recognise the format, check the geometry and call the codec.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "image/exif.h"
#include "image/heif.h"
#include "image/jpeg.h"
#include "image/png.h"
#include "image/resize.h"
#include "image/webp.h"
#include "jpeg/plan.h"
#include "torchstream_image.h"

struct ts_image_decoder {
  explicit ts_image_decoder(int64_t pixels) : max_pixels(pixels), jpeg(pixels) {}

  int64_t max_pixels;
  ts::image::JpegDecoder jpeg;
  ts::image::PngDecoder png;
  ts::image::WebpDecoder webp;
  ts::image::Resizer resizer;
  std::vector<uint8_t> row;  // a copy of a source row that has too little memory after it
  int32_t damage = TS_IMAGE_DAMAGE_REFUSE;
  std::string tolerated;  // the damage of the last image, if it was tolerated
};

namespace ts::image {
namespace {

constexpr int64_t kDefaultMaxPixels = 178956970;
constexpr int32_t kMaxOutputs = 65535;  // pixels a side of a resized image
// libpng's own default. Buffers hold some rows, and weights for every column or row, so the sides
// themselves must be limited, not only their product.
constexpr int32_t kMaxSide = 1000000;

[[noreturn]] void unknown_format(const uint8_t* data, size_t bytes) {
  const auto starts = [&](size_t at, const char* magic) {
    const size_t size = std::strlen(magic);
    return bytes >= at + size && std::memcmp(data + at, magic, size) == 0;
  };
  const char* what = "an unknown format";
  if (bytes == 0) what = "an empty file";
  if (starts(0, "GIF8")) what = "a GIF";
  if (starts(0, "BM")) what = "a BMP";
  if (starts(0, "II*") || starts(0, "MM")) what = "a TIFF";
  throw Failure(TS_ERROR_UNSUPPORTED, std::string("not a JPEG, PNG, WebP, AVIF or HEIC: ") + what +
                                          " of " + std::to_string(bytes) + " bytes");
}

// Only libheif needs max_pixels to read a header.
ts_image_info stored_header(const uint8_t* data, size_t bytes, int64_t max_pixels) {
  require(data != nullptr || bytes == 0, "data is NULL");
  if (is_jpeg(data, bytes)) return jpeg_header(data, bytes);
  if (is_png(data, bytes)) return png_header(data, bytes);
  if (is_webp(data, bytes)) return webp_header(data, bytes);
  if (is_heif(data, bytes)) return heif_header(data, bytes, max_pixels);
  unknown_format(data, bytes);
}

ts_image_info header(const uint8_t* data, size_t bytes) {
  ts_image_info info = stored_header(data, bytes, INT64_MAX);
  info.orientation = exif_orientation(info.format, data, bytes);
  return info;
}

// Reports whether [begin, begin + size) is a non-empty part of [0, whole).
bool inside(int32_t begin, int32_t size, int32_t whole) {
  return begin >= 0 && size >= 1 && begin <= whole && size <= whole - begin;
}

// Returns the geometry, after checking everything that does not depend on the image's size.
ts_image_geometry checked(const ts_image_geometry* geometry) {
  require_size(geometry, "geometry");
  const ts_image_geometry g = known(geometry);
  require(g.resize_width >= 1 && g.resize_width <= kMaxOutputs && g.resize_height >= 1 &&
              g.resize_height <= kMaxOutputs,
          "geometry: the resized image must be from 1 to 65535 pixels a side");
  require(inside(g.window_x, g.window_width, g.resize_width) &&
              inside(g.window_y, g.window_height, g.resize_height),
          "geometry: the window is not inside the resized image");
  require(g.orientation >= 0 && g.orientation <= 8, "geometry: orientation is not in 0 to 8");
  require(
      g.interpolation >= TS_INTERPOLATION_DEFAULT && g.interpolation <= TS_INTERPOLATION_BICUBIC,
      "geometry: interpolation is none of TS_INTERPOLATION_");
  return g;
}

// As above, for pixels that are written to dst.
ts_image_geometry checked(const ts_image_geometry* geometry, const uint8_t* dst, size_t stride) {
  const ts_image_geometry g = checked(geometry);
  require(dst != nullptr, "dst is NULL");
  require(stride >= static_cast<size_t>(g.window_width) * 3,
          "stride is less than the window's width * 3 bytes");
  return g;
}

// Checks the crop box, which is in the upright frame. Width and height are the stored image's.
void check_crop(const ts_image_geometry& g, int32_t width, int32_t height) {
  if (g.orientation >= 5) std::swap(width, height);
  if (inside(g.crop_x, g.crop_width, width) && inside(g.crop_y, g.crop_height, height)) return;
  throw Failure(TS_ERROR_INVALID_ARGUMENT,
                "geometry: the crop box " + std::to_string(g.crop_width) + " x " +
                    std::to_string(g.crop_height) + " at (" + std::to_string(g.crop_x) + ", " +
                    std::to_string(g.crop_y) + ") is not inside the image of " +
                    std::to_string(width) + " x " + std::to_string(height));
}

// Returns the geometry with crop_x and crop_y as the crop box's position in the stored image.
ts_image_geometry stored_crop(const ts_image_geometry& g, int32_t width, int32_t height) {
  if (g.orientation >= 5) std::swap(width, height);
  int32_t x0 = g.crop_x;
  int32_t y0 = g.crop_y;
  int32_t x1 = g.crop_x + g.crop_width - 1;
  int32_t y1 = g.crop_y + g.crop_height - 1;
  stored_place(g.orientation, width, height, &x0, &y0);
  stored_place(g.orientation, width, height, &x1, &y1);
  ts_image_geometry placed = g;
  placed.crop_x = std::min(x0, x1);
  placed.crop_y = std::min(y0, y1);
  return placed;
}

// Returns the reduction at which a JPEG is decoded.
int32_t reduction_of(const ts_image_geometry& g) {
  if (!g.dct_scaling || g.interpolation == TS_INTERPOLATION_NEAREST) return 1;
  constexpr int64_t kGap = 2;  // the reduced box is at least this many times as large as the result
  int32_t reduction = 8;
  while (reduction > 1 && (g.crop_width < kGap * reduction * g.resize_width ||
                           g.crop_height < kGap * reduction * g.resize_height)) {
    reduction /= 2;
  }
  return reduction;
}

// Decodes into dst. The geometry's crop_x and crop_y apply to the stored image.
void decode_stored(ts_image_decoder* decoder, int32_t format, const uint8_t* data, size_t bytes,
                   const ts_image_geometry& geometry, uint8_t* dst, size_t stride,
                   const EntriesIn* in, EntriesOut* out) {
  if (format == TS_IMAGE_FORMAT_JPEG) {
    const Box box = decoder->resizer.start(geometry, dst, stride, reduction_of(geometry));
    decoder->jpeg.decode(data, bytes, box, &decoder->resizer, in, out);
  } else if (format == TS_IMAGE_FORMAT_PNG) {
    png_check(data, bytes);
    const Box box = decoder->resizer.start(geometry, dst, stride);
    decoder->png.decode(data, bytes, box, &decoder->resizer);
  } else if (format == TS_IMAGE_FORMAT_WEBP) {
    webp_check(data, bytes);
    const Box box = decoder->resizer.start(geometry, dst, stride);
    decoder->webp.decode(data, bytes, box, &decoder->resizer);
  } else {
    const Box box = decoder->resizer.start(geometry, dst, stride);
    heif_decode(data, bytes, decoder->max_pixels, box, &decoder->resizer);
  }
}

// Returns the header of an image within the decoder's limits, without its orientation. Throws
// Failure for a larger image.
ts_image_info bounded_header(const ts_image_decoder* decoder, const uint8_t* data, size_t bytes) {
  const ts_image_info info = stored_header(data, bytes, decoder->max_pixels);
  if (int64_t{info.width} * info.height > decoder->max_pixels) {
    throw Failure(TS_ERROR_UNSUPPORTED, "an image of " + std::to_string(info.width) + " x " +
                                            std::to_string(info.height) + " is over the limit of " +
                                            std::to_string(decoder->max_pixels) + " pixels");
  }
  if (info.width > kMaxSide || info.height > kMaxSide) {
    throw Failure(TS_ERROR_UNSUPPORTED, "an image of " + std::to_string(info.width) + " x " +
                                            std::to_string(info.height) + " is over the limit of " +
                                            std::to_string(kMaxSide) + " pixels a side");
  }
  return info;
}

void decode(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
            const ts_image_geometry& geometry, uint8_t* dst, size_t stride,
            const EntriesIn* in = nullptr, EntriesOut* out = nullptr) {
  decoder->tolerated.clear();
  const ts_image_info info = bounded_header(decoder, data, bytes);
  check_crop(geometry, info.width, info.height);
  const ts_image_geometry placed = stored_crop(geometry, info.width, info.height);
  try {
    decode_stored(decoder, info.format, data, bytes, placed, dst, stride, in, out);
  } catch (const Failure& failure) {
    const bool tolerant = info.format == TS_IMAGE_FORMAT_JPEG || info.format == TS_IMAGE_FORMAT_PNG;
    if (failure.code() != TS_ERROR_DECODE || decoder->damage == TS_IMAGE_DAMAGE_REFUSE ||
        !tolerant) {
      throw;
    }
    const bool partial = decoder->damage == TS_IMAGE_DAMAGE_PARTIAL;
    const Box box = decoder->resizer.start(placed, dst, stride);
    if (info.format == TS_IMAGE_FORMAT_JPEG) {
      decoder->jpeg.decode_damaged(data, bytes, box, partial, &decoder->resizer);
    } else {
      decoder->png.decode_damaged(data, bytes, box, partial, &decoder->resizer);
    }
    decoder->tolerated = failure.what();
  }
}

PlanMemory plan_memory(uint8_t* data, size_t bytes, uint64_t* used) {
  require(data != nullptr || bytes == 0, "the plan's memory is NULL");
  require(reinterpret_cast<uintptr_t>(data) % jpeg::kPlanAlign == 0,
          "the plan's memory is not aligned to 16 bytes");
  return {data, bytes, used};
}

size_t plan(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
            const ts_image_geometry& geometry, ts_image_entries entries, uint64_t* proof,
            PlanMemory* to) {
  const ts_image_info info = bounded_header(decoder, data, bytes);
  check_crop(geometry, info.width, info.height);
  if (info.format != TS_IMAGE_FORMAT_JPEG || reduction_of(geometry) != 1) return 0;
  if (entries.data == nullptr && proof == nullptr) {
    return decoder->jpeg.plan_scan(data, bytes, info, geometry, to);
  }
  const EntriesIn in = {entries.data, entries.bytes, proof};
  return decoder->jpeg.plan(data, bytes, info, geometry, in, to);
}

// Does ts_image_plan_head or, with `part`, ts_image_plan_part.
size_t plan_head(ts_image_decoder* decoder, const ts_image_head* head,
                 const ts_image_geometry* geometry, const ts_image_entries& entries, PlanMemory* to,
                 FilePart* part) {
  require(decoder != nullptr, "decoder is NULL");
  require(head != nullptr, "head is NULL");
  require(entries.data != nullptr || entries.bytes == 0, "entries.data is NULL");
  const ts_image_geometry known = checked(geometry);
  const ts_image_info info = bounded_header(decoder, head->data, head->bytes);
  check_crop(known, info.width, info.height);
  if (info.format != TS_IMAGE_FORMAT_JPEG || reduction_of(known) != 1) return 0;
  const FileHead from = {head->data, head->bytes, head->file_bytes, head->scan};
  return decoder->jpeg.plan_head(from, info, known, {entries.data, entries.bytes, nullptr}, to,
                                 part);
}

EntriesOut entries_out(const ts_image_entries_buffer& buffer, const ts_image_entries_made* made) {
  require(buffer.spacing >= 0 && buffer.spacing <= INT32_MAX, "buffer.spacing is out of range");
  require(buffer.data != nullptr || buffer.capacity == 0, "buffer.data is NULL");
  require(made != nullptr, "made is NULL");
  return {static_cast<uint32_t>(buffer.spacing), buffer.data, buffer.capacity};
}

void resize(ts_image_decoder* decoder, const uint8_t* src, int32_t width, int32_t height,
            size_t src_stride, const ts_image_geometry& geometry, uint8_t* dst, size_t dst_stride) {
  require(src != nullptr, "src is NULL");
  require(width >= 1 && height >= 1, "width and height must be at least 1");
  const size_t row_bytes = static_cast<size_t>(width) * 3;
  require(src_stride >= row_bytes, "src_stride is less than width * 3 bytes");
  require(static_cast<size_t>(height) <= PTRDIFF_MAX / src_stride, "src_stride * height overflows");
  check_crop(geometry, width, height);
  const Box box = decoder->resizer.start(stored_crop(geometry, width, height), dst, dst_stride);
  // The last rows may have too little memory after them for the resizer, so they are copied first.
  const size_t end = static_cast<size_t>(height - 1) * src_stride + row_bytes;
  const size_t left = static_cast<size_t>(box.x0) * 3;
  const size_t needed = static_cast<size_t>(box.width()) * 3;
  int32_t direct = box.y0;
  while (direct < box.y1 &&
         static_cast<size_t>(direct) * src_stride + left + needed + kRowSlack <= end) {
    ++direct;
  }
  decoder->resizer.push(src + static_cast<size_t>(box.y0) * src_stride + left, src_stride,
                        direct - box.y0);
  if (decoder->row.size() < needed + kRowSlack) decoder->row.resize(needed + kRowSlack);
  for (int32_t y = direct; y < box.y1; ++y) {
    std::memcpy(decoder->row.data(), src + static_cast<size_t>(y) * src_stride + left, needed);
    decoder->resizer.push(decoder->row.data(), needed, 1);
  }
}

}  // namespace
}  // namespace ts::image

int32_t ts_image_abi_version(void) { return TS_IMAGE_ABI_VERSION; }

ts_error* ts_image_get_info(const uint8_t* data, size_t bytes, ts_image_info* info) {
  return ts::guard(__func__, [&] {
    ts::require_size(info, "info");
    ts::fill(info, ts::image::header(data, bytes));
  });
}

ts_error* ts_image_decoder_new(int64_t max_pixels, ts_image_decoder** decoder) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(max_pixels >= 0, "max_pixels is negative");
    *decoder = std::make_unique<ts_image_decoder>(max_pixels == 0 ? ts::image::kDefaultMaxPixels
                                                                  : max_pixels)
                   .release();
  });
}

void ts_image_decoder_free(ts_image_decoder* decoder) {
  const std::unique_ptr<ts_image_decoder> owned(decoder);
}

ts_error* ts_image_decoder_set_damage(ts_image_decoder* decoder, int32_t damage) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(damage >= TS_IMAGE_DAMAGE_REFUSE && damage <= TS_IMAGE_DAMAGE_PARTIAL,
                "damage is not one of TS_IMAGE_DAMAGE_");
    decoder->damage = damage;
  });
}

const char* ts_image_decoder_tolerated(const ts_image_decoder* decoder) {
  return decoder == nullptr ? "" : decoder->tolerated.c_str();
}

ts_error* ts_image_decode(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                          const ts_image_geometry* geometry, uint8_t* dst, size_t stride) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    const ts_image_geometry known = ts::image::checked(geometry, dst, stride);
    ts::image::decode(decoder, data, bytes, known, dst, stride);
  });
}

ts_error* ts_image_make_entries(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                ts_image_entries_buffer buffer, ts_image_entries_made* made) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::image::EntriesOut out = ts::image::entries_out(buffer, made);
    if (ts::image::bounded_header(decoder, data, bytes).format == TS_IMAGE_FORMAT_JPEG) {
      decoder->jpeg.make_entries(data, bytes, &out);
    }
    *made = {out.written, out.proof};
  });
}

ts_error* ts_image_decode_make_entries(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                       const ts_image_geometry* geometry, uint8_t* dst,
                                       size_t stride, ts_image_entries_buffer buffer,
                                       ts_image_entries_made* made) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    const ts_image_geometry known = ts::image::checked(geometry, dst, stride);
    ts::image::EntriesOut out = ts::image::entries_out(buffer, made);
    ts::image::decode(decoder, data, bytes, known, dst, stride, nullptr, &out);
    *made = {out.written, out.proof};
  });
}

ts_error* ts_image_decode_with_entries(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                       const ts_image_geometry* geometry, ts_image_entries entries,
                                       uint8_t* dst, size_t stride, uint64_t* proof) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(entries.data != nullptr || entries.bytes == 0, "entries.data is NULL");
    const ts_image_geometry known = ts::image::checked(geometry, dst, stride);
    const ts::image::EntriesIn in = {entries.data, entries.bytes, proof};
    ts::image::decode(decoder, data, bytes, known, dst, stride, &in);
  });
}

ts_error* ts_image_transcode(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                             uint8_t* buffer, size_t capacity, size_t* written) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(buffer != nullptr || capacity == 0, "buffer is NULL");
    ts::require(written != nullptr, "written is NULL");
    const ts_image_info info = ts::image::bounded_header(decoder, data, bytes);
    *written = info.format == TS_IMAGE_FORMAT_JPEG && info.progressive
                   ? decoder->jpeg.transcode(data, bytes, buffer, capacity)
                   : 0;
  });
}

ts_error* ts_image_plan_segments(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                 const ts_image_geometry* geometry, ts_image_entries entries,
                                 uint64_t* proof, uint8_t* buffer, size_t capacity,
                                 size_t* planned) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(entries.data != nullptr || entries.bytes == 0, "entries.data is NULL");
    ts::image::PlanMemory to = ts::image::plan_memory(buffer, capacity, nullptr);
    ts::require(planned != nullptr, "planned is NULL");
    *planned =
        ts::image::plan(decoder, data, bytes, ts::image::checked(geometry), entries, proof, &to);
  });
}

ts_error* ts_image_plan_append(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                               const ts_image_geometry* geometry, ts_image_entries entries,
                               uint64_t* proof, ts_image_plans plans, size_t* at, size_t* planned) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(entries.data != nullptr, "entries.data is NULL");
    ts::require(plans.used != nullptr, "plans.used is NULL");
    ts::image::PlanMemory to = ts::image::plan_memory(plans.data, plans.bytes, plans.used);
    ts::require(at != nullptr && planned != nullptr, "at or planned is NULL");
    to.at = SIZE_MAX;
    const size_t size =
        ts::image::plan(decoder, data, bytes, ts::image::checked(geometry), entries, proof, &to);
    *planned = to.at == SIZE_MAX ? 0 : size;
    *at = to.at == SIZE_MAX ? 0 : to.at;
  });
}

ts_error* ts_image_plan_scan(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                             const ts_image_geometry* geometry, ts_image_plans plans,
                             ts_image_search* search, size_t* at, size_t* planned) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::image::PlanMemory to = ts::image::plan_memory(plans.data, plans.bytes, plans.used);
    ts::require(at != nullptr && planned != nullptr, "at or planned is NULL");
    const ts_image_geometry known = ts::image::checked(geometry);
    const ts_image_info info = ts::image::bounded_header(decoder, data, bytes);
    ts::image::check_crop(known, info.width, info.height);
    to.at = SIZE_MAX;
    size_t size = 0;
    ts_image_search found = {};
    if (info.format == TS_IMAGE_FORMAT_JPEG && ts::image::reduction_of(known) == 1) {
      size = decoder->jpeg.plan_scan(data, bytes, info, known, &to,
                                     {true, search == nullptr ? nullptr : &found});
    }
    const bool taken = to.at != SIZE_MAX;
    if (search != nullptr && taken && found.wanted != 0) {
      found.digest = ts::image::xxh64(data, bytes, 0);
      found.proof = ts::image::proof_of_file(data, bytes);
    }
    if (search != nullptr) *search = found;
    *planned = taken || plans.used == nullptr ? size : 0;
    *at = taken ? to.at : 0;
  });
}

ts_error* ts_image_pack_entries(const ts_image_search* search, const uint8_t* found,
                                size_t found_bytes, ts_image_entries_buffer buffer,
                                ts_image_entries_made* made) {
  return ts::guard(__func__, [&] {
    ts::require(search != nullptr, "search is NULL");
    ts::require(
        search->spacing >= 1 && search->wanted % search->spacing == 0 &&
            search->scan <= search->file_bytes &&
            search->entries == (uint64_t{search->mcus} + search->spacing - 1) / search->spacing,
        "search is not one of ts_image_plan_scan");
    ts::require(
        found != nullptr && found_bytes == uint64_t{search->entries} * ts::jpeg::kScanEntryBytes,
        "found is NULL, or has another size than the search's entries");
    const ts::image::EntriesOut out = ts::image::entries_out(buffer, made);
    const size_t size = ts::image::pack_found(*search, found, out.buffer, out.capacity);
    const bool written = size > 0 && size <= out.capacity;
    *made = {size, written ? ts::image::proof_of_entries(search->proof, out.buffer, size) : 0};
  });
}

ts_error* ts_image_plan_head(ts_image_decoder* decoder, const ts_image_head* head,
                             const ts_image_geometry* geometry, ts_image_entries entries,
                             uint8_t* buffer, size_t capacity, size_t* planned) {
  return ts::guard(__func__, [&] {
    ts::image::PlanMemory to = ts::image::plan_memory(buffer, capacity, nullptr);
    ts::require(planned != nullptr, "planned is NULL");
    *planned = ts::image::plan_head(decoder, head, geometry, entries, &to, nullptr);
  });
}

ts_error* ts_image_plan_part(ts_image_decoder* decoder, const ts_image_head* head,
                             const ts_image_geometry* geometry, ts_image_entries entries,
                             size_t piece, ts_image_plans plans, ts_image_part* part) {
  return ts::guard(__func__, [&] {
    ts::require(plans.used != nullptr, "plans.used is NULL");
    ts::image::PlanMemory to = ts::image::plan_memory(plans.data, plans.bytes, plans.used);
    ts::require(part != nullptr, "part is NULL");
    ts::require(piece >= 1 && piece <= INT32_MAX, "piece is not from 1 to 2^31 - 1");
    to.at = SIZE_MAX;
    ts::image::FilePart of = {piece};
    const size_t size = ts::image::plan_head(decoder, head, geometry, entries, &to, &of);
    *part = {};
    if (size != 0 && to.at != SIZE_MAX) {
      *part = {to.at, size, of.begin, of.bytes, to.at + of.at};
    }
  });
}

ts_error* ts_image_decoder_get_stats(const ts_image_decoder* decoder,
                                     ts_image_decoder_stats* stats) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require_size(stats, "stats");
    const ts::image::JpegStats& jpeg = decoder->jpeg.stats();
    ts::fill(stats, {0, jpeg.own, jpeg.libjpeg, jpeg.gave_up, jpeg.entries_used,
                     jpeg.entries_verified, jpeg.entries_refused, jpeg.entries_made});
  });
}

ts_error* ts_image_encode_jpeg(ts_image_decoder* decoder, const uint8_t* pixels, int32_t width,
                               int32_t height, size_t stride, int32_t quality, uint8_t* buffer,
                               size_t capacity, size_t* written) {
  return ts::guard(__func__, [&] {
    constexpr int32_t kMaxSide = 65500;  // libjpeg's
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(pixels != nullptr, "pixels is NULL");
    ts::require(width >= 1 && width <= kMaxSide && height >= 1 && height <= kMaxSide,
                "width and height must be in 1 to 65500");
    ts::require(stride >= size_t{3} * static_cast<size_t>(width), "stride is less than a row");
    ts::require(quality >= 1 && quality <= 100, "quality must be in 1 to 100");
    ts::require(buffer != nullptr || capacity == 0, "buffer is NULL");
    ts::require(written != nullptr, "written is NULL");
    *written = decoder->jpeg.encode({pixels, width, height, stride}, quality, buffer, capacity);
  });
}

ts_error* ts_image_resize(ts_image_decoder* decoder, const uint8_t* src, int32_t width,
                          int32_t height, size_t src_stride, const ts_image_geometry* geometry,
                          uint8_t* dst, size_t dst_stride) {
  return ts::guard(__func__, [&] {
    ts::require(decoder != nullptr, "decoder is NULL");
    const ts_image_geometry known = ts::image::checked(geometry, dst, dst_stride);
    ts::image::resize(decoder, src, width, height, src_stride, known, dst, dst_stride);
  });
}
