#include "image/jpeg.h"

#include <jpeglib.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
// jerror.h needs jpeglib.h before it.
#include <jerror.h>

#include "base/error.h"
#include "image/damage.h"
#include "image/entries.h"
#include "image/jpeg_entropy.h"
#include "image/jpeg_plan.h"
#include "image/jpeg_scan.h"
#include "image/xxh3.h"

#define TS_STRING(x) #x
#define TS_VALUE(x) TS_STRING(x)

namespace ts::image {

// libjpeg reports an error through a function that must neither return nor throw across libjpeg's C
// frames, so that function jumps. The jump crosses only frames of libjpeg and of the functions
// marked "confined" below, which own nothing.
struct JpegState {
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  jpeg_progress_mgr progress;
  std::jmp_buf jump;
  int32_t failure;      // a TS_ERROR_ code
  const uint8_t* data;  // the file
  size_t bytes;
  char text[JMSG_LENGTH_MAX];
  int skipped;   // columns from the first decoded column to the first wanted column
  int unwanted;  // rows above the first wanted row that still must be decoded
  EntropyDecoder entropy;
  bool own;                                      // this image's coefficients come from `entropy`
  bool tolerant;                                 // warnings are not failures
  bool ended;                                    // libjpeg asked for bytes after the file's end
  bool cut;                                      // libjpeg needed those bytes
  void* (*allocate)(j_common_ptr, int, size_t);  // libjpeg's own allocator
};

namespace {

constexpr int kRowsAtOnce = 16;
constexpr int kMinWidth = 32;
// Far above the number that encoders write (about 10). A small progressive file with many scans is
// slow to decode.
constexpr int kMaxScans = 100;
// The value of JpegState::failure after our own entropy decoder has given up.
constexpr int32_t kGaveUp = -1;

// Computes a * b / 255, rounded, like Pillow's MULDIV255.
inline uint8_t scale255(int a, int b) {
  const int product = a * b + 128;
  return static_cast<uint8_t>(((product >> 8) + product) >> 8);
}

// Converts a row in place, like Pillow. CMYK in JPEG is inverted ("Adobe"): 255 is no ink.
void cmyk_to_rgb(uint8_t* row, size_t pixels) {
  const uint8_t* in = row;
  for (size_t i = 0; i < pixels; ++i, in += 4, row += 3) {
    // Pillow: ink = 255 - stored; rgb = (255 - black) - ink * (255 - black) / 255, clipped.
    const int light = in[3];
    const int rgb[3] = {light - scale255(255 - in[0], light), light - scale255(255 - in[1], light),
                        light - scale255(255 - in[2], light)};
    for (int c = 0; c < 3; ++c) row[c] = static_cast<uint8_t>(std::max(rgb[c], 0));
  }
}

int32_t failure_code(int message) {
  switch (message) {
    case JERR_OUT_OF_MEMORY:
    case JERR_NO_BACKING_STORE:
      return TS_ERROR_OUT_OF_MEMORY;
#if JPEG_LIB_VERSION < 70  // Ubuntu's has libjpeg 8's interface, in which this is not an error
    case JERR_ARITH_NOTIMPL:
#endif
    case JERR_BAD_PRECISION:
    case JERR_CCIR601_NOTIMPL:
    case JERR_COMPONENT_COUNT:
    case JERR_CONVERSION_NOTIMPL:
    case JERR_FRACT_SAMPLE_NOTIMPL:
    case JERR_IMAGE_TOO_BIG:
    case JERR_NOT_COMPILED:
    case JERR_SOF_UNSUPPORTED:
    case JERR_WIDTH_OVERFLOW:
      return TS_ERROR_UNSUPPORTED;
    default:
      return TS_ERROR_DECODE;
  }
}

[[noreturn]] void fail(j_common_ptr codec) {
  auto* state = static_cast<JpegState*>(codec->client_data);
  codec->err->format_message(codec, state->text);
  state->failure = failure_code(codec->err->msg_code);
  std::longjmp(state->jump, 1);
}

// Level -1 is a warning: libjpeg continues with invented pixels. A warning is a failure unless the
// caller tolerates damage. Other levels are traces.
void message(j_common_ptr codec, int level) {
  if (level >= 0) return;
  auto* state = static_cast<JpegState*>(codec->client_data);
  if (!state->tolerant) fail(codec);
  // The scan needed bits and found a marker. If the file has ended, it is the marker that
  // fill_behind_end supplied.
  if (codec->err->msg_code == JWRN_HIT_MARKER && state->ended) state->cut = true;
}

// Supplies an end marker after the file's end, like libjpeg's own memory source.
boolean fill_behind_end(j_decompress_ptr codec) {
  static const JOCTET kEnd[] = {0xFF, JPEG_EOI};
  auto* state = static_cast<JpegState*>(codec->client_data);
  state->ended = true;
  WARNMS(codec, JWRN_JPEG_EOF);
  codec->src->next_input_byte = kEnd;
  codec->src->bytes_in_buffer = sizeof kEnd;
  return TRUE;
}

// Handles a restart marker that is missing or wrong. After the file's end there is none.
boolean resync(j_decompress_ptr codec, int desired) {
  auto* state = static_cast<JpegState*>(codec->client_data);
  if (state->ended) state->cut = true;
  const boolean done = jpeg_resync_to_restart(codec, desired);
  if (state->ended) state->cut = true;
  return done;
}

void silent(j_common_ptr) {}

void progress(j_common_ptr codec) {
  if (reinterpret_cast<j_decompress_ptr>(codec)->input_scan_number <= kMaxScans) return;
  auto* state = static_cast<JpegState*>(codec->client_data);
  std::snprintf(state->text, sizeof state->text, "more than %d scans", kMaxScans);
  state->failure = TS_ERROR_UNSUPPORTED;
  std::longjmp(state->jump, 1);
}

// libjpeg keeps tables for later images, where they replace missing tables, so the pixels of a
// damaged file would depend on the previous file. Here tables belong to their image, and so does
// their memory.
void* allocate(j_common_ptr codec, int pool, size_t bytes) {
  auto* state = static_cast<JpegState*>(codec->client_data);
  return state->allocate(codec, pool == JPOOL_PERMANENT ? JPOOL_IMAGE : pool, bytes);
}

bool create(JpegState* state) {  // confined
  if (setjmp(state->jump) != 0) return false;
  jpeg_create_decompress(&state->codec);
  state->allocate = state->codec.mem->alloc_small;
  return true;
}

// Reports whether the last bits of some coefficients of a progressive image are missing. libjpeg
// then estimates those coefficients from the neighbouring blocks.
bool smooths(const jpeg_decompress_struct* codec) {
  if (codec->coef_bits == nullptr) return false;
  for (int c = 0; c < codec->num_components; ++c) {
    for (int i = 0; i < DCTSIZE2; ++i) {
      if (codec->coef_bits[c][i] != 0) return true;
    }
  }
  return false;
}

// The layout of libjpeg's entropy decoder in jpegint.h, which has not changed since version 6b.
// Each image has its own copy, in which our function replaces decode_mcu. The configuration checks
// the layout (TS_JPEG_SEAM). Every new decoder checks it again with the library that is linked
// (works).
struct EntropyModule {
  void (*start_pass)(j_decompress_ptr);
  boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW*);
  boolean insufficient_data;
};

boolean decode_mcu(j_decompress_ptr codec, JBLOCKROW* blocks) {
  static_assert(sizeof(JBLOCK) == sizeof(int16_t[64]), "coefficients have 16 bits");
  auto* state = static_cast<JpegState*>(codec->client_data);
  if (state->entropy.next(blocks)) return TRUE;
  state->failure = kGaveUp;
  std::longjmp(state->jump, 1);
}

// Reports whether the file is large enough for the image of its header, or sets the failure.
// libjpeg allocates the coefficients of a progressive image before it reads them, so a short file
// could demand much memory. Every block of the finest component needs at least one bit, unless
// arithmetic coding is used. The pixels that libjpeg invents for a damaged single scan need no
// memory.
bool large_enough(JpegState* state) {  // confined
  jpeg_decompress_struct* codec = &state->codec;
  size_t blocks = 0;
  for (int i = 0; i < codec->num_components; ++i) {
    const jpeg_component_info* component = &codec->comp_info[i];
    const size_t across = (static_cast<size_t>(codec->image_width) * component->h_samp_factor +
                           codec->max_h_samp_factor * DCTSIZE - 1) /
                          (static_cast<size_t>(codec->max_h_samp_factor) * DCTSIZE);
    const size_t down = (static_cast<size_t>(codec->image_height) * component->v_samp_factor +
                         codec->max_v_samp_factor * DCTSIZE - 1) /
                        (static_cast<size_t>(codec->max_v_samp_factor) * DCTSIZE);
    if (across * down > blocks) blocks = across * down;
  }
  const bool held = !state->tolerant || jpeg_has_multiple_scans(codec) != 0;
  if (!held || codec->arith_code || state->bytes >= blocks / 8) return true;
  std::snprintf(state->text, sizeof state->text, "%zu bytes are too few for %u x %u pixels",
                state->bytes, codec->image_width, codec->image_height);
  state->failure = TS_ERROR_DECODE;
  return false;
}

// Starts to read a file. After a failure jumps to state->jump, which the caller has set.
void read_header(JpegState* state, const uint8_t* data, size_t bytes) {  // confined
  jpeg_decompress_struct* codec = &state->codec;
  state->data = data;
  state->bytes = bytes;
  state->ended = state->cut = false;
  jpeg_mem_src(codec, data, static_cast<unsigned long>(bytes));
  codec->src->fill_input_buffer = fill_behind_end;
  codec->src->resync_to_restart = resync;
  codec->mem->alloc_small = allocate;
  jpeg_read_header(codec, TRUE);
}

// Reads up to the first bit of the scan, or through all scans if there are several. box may be
// NULL.
bool open(JpegState* state, const uint8_t* data, size_t bytes, const Box* box) {  // confined
  jpeg_decompress_struct* codec = &state->codec;
  if (setjmp(state->jump) != 0) return false;
  read_header(state, data, bytes);
  const JDIMENSION reduction = box == nullptr ? 1 : static_cast<JDIMENSION>(box->reduction);
  codec->scale_num = 1;
  codec->scale_denom = reduction;
  if (box != nullptr &&
      (static_cast<JDIMENSION>(box->x1) > (codec->image_width + reduction - 1) / reduction ||
       static_cast<JDIMENSION>(box->y1) > (codec->image_height + reduction - 1) / reduction)) {
    std::snprintf(state->text, sizeof state->text, "two frame headers that differ");
    state->failure = TS_ERROR_DECODE;
    return false;
  }
  if (!large_enough(state)) return false;
  codec->out_color_space = codec->num_components == 4 ? JCS_CMYK : JCS_RGB;
  codec->dct_method = JDCT_ISLOW;
  codec->do_fancy_upsampling = TRUE;
  jpeg_start_decompress(codec);
  return true;
}

// Reports whether jpeg_crop_scanline is right about every component. It assumes a component's width
// in an unreduced image, but libjpeg may reduce subsampled components less than others. A wrong
// width is harmless if the component is not interpolated.
bool croppable(const jpeg_decompress_struct* codec) {
#if JPEG_LIB_VERSION >= 70
  const int block = codec->min_DCT_h_scaled_size;
#else
  const int block = codec->min_DCT_scaled_size;
#endif
  for (int i = 0; i < codec->num_components; ++i) {
    const jpeg_component_info* component = &codec->comp_info[i];
#if JPEG_LIB_VERSION >= 70
    const int own = component->DCT_h_scaled_size;
#else
    const int own = component->DCT_scaled_size;
#endif
    if (own != block && (component->h_samp_factor * own != codec->max_h_samp_factor * block ||
                         component->v_samp_factor * own != codec->max_v_samp_factor * block)) {
      return false;
    }
  }
  return true;
}

// Advances to the first row of the box, or leaves state->unwanted rows above it to be decoded.
bool start(JpegState* state, const Box* box) {  // confined
  jpeg_decompress_struct* codec = &state->codec;
  if (setjmp(state->jump) != 0) return false;
  // A tolerant decode needs the verdict on all rows. Smoothing of missing coefficients reads
  // neighbouring blocks, which a crop leaves out. In both cases the whole image is decoded.
  if (state->tolerant || smooths(codec)) {
    state->skipped = box->x0;
    state->unwanted = box->y0;
    return true;
  }

  // libjpeg interpolates chroma between neighbours, and treats a crop's edge as the image's edge. A
  // margin of two pixels keeps the wrong edge outside the box. libjpeg does not interpolate very
  // narrow components at all, so a crop has a minimum width.
  const auto width = static_cast<int>(codec->output_width);
  const int margin = codec->max_h_samp_factor > 1 ? 2 : 0;
  int right = std::min(width, std::max(box->x1 + margin, box->x0 + kMinWidth));
  int left = std::max(0, std::min(box->x0 - margin, right - kMinWidth));
  if (!croppable(codec)) left = 0, right = width;
  if (left > 0 || right < width) {
    auto first = static_cast<JDIMENSION>(left);
    auto columns = static_cast<JDIMENSION>(right - left);
    jpeg_crop_scanline(codec, &first, &columns);
    left = static_cast<int>(first);
  }
  if (state->own) {
    // The columns of MCUs that libjpeg transforms (jpeg_crop_scanline).
    const int block = DCTSIZE / box->reduction;
    const int align = block * (codec->comps_in_scan == 1 ? 1 : codec->max_h_samp_factor);
    const int end = left + static_cast<int>(codec->output_width);
    state->entropy.want(static_cast<uint32_t>(left / align),
                        static_cast<uint32_t>((end - 1) / align));
    reinterpret_cast<EntropyModule*>(codec->entropy)->decode_mcu = decode_mcu;
  }
  state->skipped = box->x0 - left;
  state->unwanted = 0;
  if (box->y0 > 0) jpeg_skip_scanlines(codec, static_cast<JDIMENSION>(box->y0));
  return true;
}

// Reads the next rows into the band.
bool read(JpegState* state, uint8_t* band, size_t stride, int rows) {  // confined
  JSAMPROW pointers[kRowsAtOnce];
  if (setjmp(state->jump) != 0) return false;
  for (int i = 0; i < rows; ++i) pointers[i] = band + static_cast<size_t>(i) * stride;
  for (int done = 0; done < rows;) {
    const JDIMENSION read =
        jpeg_read_scanlines(&state->codec, pointers + done, static_cast<JDIMENSION>(rows - done));
    if (read == 0) {  // a memory source never suspends
      std::snprintf(state->text, sizeof state->text, "no row was decoded");
      state->failure = TS_ERROR_INTERNAL;
      return false;
    }
    done += static_cast<int>(read);
  }
  return true;
}

// Reads from the end of the last row to the end marker.
bool finish(JpegState* state) {  // confined
  if (setjmp(state->jump) != 0) return false;
  jpeg_finish_decompress(&state->codec);
  return true;
}

// The memory, of fixed size, that libjpeg writes a file to.
struct Writing {
  jpeg_compress_struct codec;
  jpeg_destination_mgr to;
};

void no_step(j_compress_ptr) {}

boolean out_of_room(j_compress_ptr codec) {
  ERREXIT(codec, JERR_CANT_SUSPEND);
  return FALSE;
}

// Reports whether libjpeg can upsample all components. libjpeg itself only finds out when it
// decodes.
bool upsamples(const jpeg_decompress_struct* codec) {
  for (int c = 0; c < codec->num_components; ++c) {
    const jpeg_component_info* component = &codec->comp_info[c];
    if (codec->max_h_samp_factor % component->h_samp_factor != 0 ||
        codec->max_v_samp_factor % component->v_samp_factor != 0) {
      return false;
    }
  }
  return true;
}

// Reports whether the standard's Huffman codes, which libjpeg writes, have symbols for all
// coefficients: libjpeg does not check that. A difference of two DC coefficients has 11 bits.
bool encodable(jpeg_decompress_struct* codec, jvirt_barray_ptr* coefficients) {  // confined
  constexpr int32_t kMax = 1023;
  uint32_t outside = 0;
  for (int c = 0; c < codec->num_components; ++c) {
    const jpeg_component_info* component = &codec->comp_info[c];
    for (JDIMENSION row = 0; row < component->height_in_blocks; ++row) {
      JBLOCKARRAY blocks = codec->mem->access_virt_barray(reinterpret_cast<j_common_ptr>(codec),
                                                          coefficients[c], row, 1, FALSE);
      for (JDIMENSION i = 0; i < component->width_in_blocks; ++i) {
        const JCOEF* const block = blocks[0][i];
        outside |= static_cast<uint32_t>(block[0] < -kMax - 1 || block[0] > kMax);
        for (int k = 1; k < DCTSIZE2; ++k) {
          outside |= static_cast<uint32_t>(block[k] < -kMax || block[k] > kMax);
        }
      }
    }
  }
  return outside == 0;
}

// Writes the coefficients of a progressive image as a baseline file. Returns false if there is no
// such file, or no room for it.
bool transcode(JpegState* state, const uint8_t* data, size_t bytes, Writing* to) {  // confined
  jpeg_decompress_struct* codec = &state->codec;
  if (setjmp(state->jump) != 0) return false;
  read_header(state, data, bytes);
  if (!codec->progressive_mode || (codec->num_components != 1 && codec->num_components != 3) ||
      !upsamples(codec) || !large_enough(state)) {
    return false;
  }
  jvirt_barray_ptr* const coefficients = jpeg_read_coefficients(codec);
  if (smooths(codec) || !encodable(codec, coefficients)) return false;
  jpeg_create_compress(&to->codec);
  jpeg_copy_critical_parameters(codec, &to->codec);
  to->codec.dest = &to->to;
  jpeg_write_coefficients(&to->codec, coefficients);
  jpeg_finish_compress(&to->codec);
  jpeg_finish_decompress(codec);
  return true;
}

// Writes pixels as a baseline file. Returns false after a failure, such as no room for the file.
bool encode(JpegState* state, const Rows& rows, int quality, Writing* to) {  // confined
  if (setjmp(state->jump) != 0) return false;
  jpeg_compress_struct* codec = &to->codec;
  jpeg_create_compress(codec);
  codec->dest = &to->to;
  codec->image_width = static_cast<JDIMENSION>(rows.width);
  codec->image_height = static_cast<JDIMENSION>(rows.height);
  codec->input_components = 3;
  codec->in_color_space = JCS_RGB;
  jpeg_set_defaults(codec);  // 4:2:0
  jpeg_set_quality(codec, quality, TRUE);
  jpeg_start_compress(codec, TRUE);
  while (codec->next_scanline < codec->image_height) {
    JSAMPROW row = const_cast<uint8_t*>(rows.pixels + size_t{codec->next_scanline} * rows.stride);
    jpeg_write_scanlines(codec, &row, 1);
  }
  jpeg_finish_compress(codec);
  return true;
}

// Frees the image's memory and keeps the codec for the next image. Cannot fail.
void end(JpegState* state) {
  jpeg_decompress_struct* codec = &state->codec;
  codec->mem->alloc_small = state->allocate;
  jpeg_abort_decompress(codec);
  for (auto& table : codec->quant_tbl_ptrs) table = nullptr;
  for (auto& table : codec->dc_huff_tbl_ptrs) table = nullptr;
  for (auto& table : codec->ac_huff_tbl_ptrs) table = nullptr;
}

// Throws the failure of the image that was opened.
[[noreturn]] void throw_failure(const JpegState& state) {
  const std::string text = std::string("JPEG: ") + state.text;
  if (state.failure != TS_ERROR_DECODE) throw Failure(state.failure, text);
  // After the file's end libjpeg reads an end marker that is not in the file.
  const uint8_t* next = state.codec.src->next_input_byte;
  throw_damage(text, state.ended ? state.bytes : static_cast<size_t>(next - state.data));
}

// Ends the image, even after a failure, because the codec must not keep an unfinished image.
struct End {
  JpegState* state;
  ~End() {
    end(state);
    state->tolerant = false;
  }
};

}  // namespace

JpegDecoder::JpegDecoder(int64_t max_pixels) : state_(std::make_unique<JpegState>()) {
  JpegState* state = state_.get();
  state->codec.err = jpeg_std_error(&state->errors);
  state->errors.error_exit = fail;
  state->errors.emit_message = message;
  state->errors.output_message = silent;
  state->own = state->tolerant = state->ended = state->cut = false;
  state->codec.client_data = state;  // jpeg_create_decompress keeps err and client_data
  if (!create(state)) {
    jpeg_destroy_decompress(&state->codec);
    throw Failure(state->failure, std::string("libjpeg: ") + state->text);
  }
  state->progress.progress_monitor = progress;
  state->codec.progress = &state->progress;
  // Progressive images are held as coefficients: 8 bytes a pixel with four components.
  constexpr int64_t kBase = int64_t{64} << 20;
  state->codec.mem->max_memory_to_use =
      static_cast<long>(kBase + 8 * std::min(max_pixels, (INT64_MAX - kBase) / 8));
  own_ = works();
}

JpegDecoder::~JpegDecoder() { jpeg_destroy_decompress(&state_->codec); }

// Decodes a grey image of two blocks, dark and light, through the seam, and checks its pixels.
bool JpegDecoder::works() {
#if TS_JPEG_SEAM
  // The file has no Huffman tables, so libjpeg-turbo supplies the standard's.
  uint8_t file[] = {0xFF, 0xD8, 0xFF, 0xDB, 0, 67, 0,
                    // 64 quantisers of 1 go here
                    8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8,
                    8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8,
                    8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 0xFF, 0xC0, 0, 11, 8, 0, 8, 0, 16, 1, 1, 0x11, 0,
                    0xFF, 0xDA, 0, 8, 1, 1, 0, 0, 63, 0,
                    // DC -64 (11110 0111111), end of block, DC +64 (11110 1000000), end of block
                    0b11110011, 0b11111010, 0b11110100, 0b00001010, 0xFF, 0xD9};
  JpegState* state = state_.get();
  const Box box = {0, 0, 16, 8};
  Scan scan;
  uint8_t pixels[8][16 * 3 + kRowSlack] = {};
  bool good = open(state, file, sizeof file, &box) &&
              describe_scan(state->codec, file, sizeof file, tables_.codes, &scan) &&
              state->entropy.start(scan);
  state->own = good;
  good = good && start(state, &box) && read(state, pixels[0], sizeof pixels[0], 8) &&
         state->entropy.decoded() == 2;
  for (const auto& row : pixels) {
    for (int x = 0; x < 16 * 3; ++x) good = good && row[x] == (x < 8 * 3 ? 64 : 128);
  }
  end(state);
  return good;
#else
  return false;
#endif
}

bool JpegDecoder::attach(const uint8_t* data, size_t bytes) {
  JpegState* state = state_.get();
  Scan scan;
  state->own = own_ && describe_scan(state->codec, data, bytes, tables_.codes, &scan) &&
               state->entropy.start(scan);
  scan_begin_ = state->own ? scan.begin : 0;
  mcus_ = state->own ? uint64_t{scan.mcus_per_row} * scan.mcu_rows : 0;
  return state->own;
}

// Decodes the box of the image that open_image and attach have prepared. Returns false if our
// entropy decoder gave up.
bool JpegDecoder::rows(const Box& box, Resizer* sink) {
  JpegState* state = state_.get();
  const auto check = [&](bool ok) {
    if (!ok && state->failure != kGaveUp) throw_failure(*state);
    return ok;
  };
  if (!check(start(state, &box))) return false;
  const jpeg_decompress_struct& codec = state->codec;
  const auto channels = static_cast<size_t>(codec.output_components);
  const size_t stride = codec.output_width * channels + kRowSlack;
  if (band_.size() < stride * kRowsAtOnce) band_.resize(stride * kRowsAtOnce);
  for (int32_t row = box.y0 - state->unwanted; row < box.y1;) {
    const bool wanted = row >= box.y0;
    const int rows = std::min(kRowsAtOnce, (wanted ? box.y1 : box.y0) - row);
    if (!check(read(state, band_.data(), stride, rows))) return false;
    row += rows;
    if (!wanted) continue;
    if (channels == 4) {
      for (int i = 0; i < rows; ++i) {
        cmyk_to_rgb(band_.data() + static_cast<size_t>(i) * stride, codec.output_width);
      }
    }
    sink->push(band_.data() + static_cast<size_t>(state->skipped) * 3, stride, rows);
  }
  if (state->tolerant) {  // decodes to the end, because damage there may refuse the image
    for (auto left = static_cast<int>(codec.output_height) - box.y1; left > 0;) {
      const int rows = std::min(kRowsAtOnce, left);
      check(read(state, band_.data(), stride, rows));
      left -= rows;
    }
  }
  return !state->own || state->entropy.finish();
}

uint64_t proof_of_file(const uint8_t* data, size_t bytes) {
  static const uint64_t secret = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  return bytes < kMinXxh3 ? xxh64(data, bytes, secret) : xxh3(data, bytes, secret);
}

uint64_t proof_of_entries(uint64_t file, const uint8_t* blob, size_t bytes) {
  return std::max<uint64_t>(1, xxh64(blob, bytes, file));
}

namespace {

uint64_t prove(const uint8_t* data, size_t bytes, const uint8_t* blob, size_t blob_bytes) {
  return proof_of_entries(proof_of_file(data, bytes), blob, blob_bytes);
}

using Trust = JpegDecoder::Trust;

Trust judge(const EntriesIn& in, const uint8_t* data, size_t bytes, Entries* entries) {
  if (!entries->attach(in.blob, in.bytes) || entries->of().bytes != bytes) return Trust::kNone;
  if (in.proof != nullptr && *in.proof != 0) {
    const bool right = *in.proof == prove(data, bytes, in.blob, in.bytes);
    return right ? Trust::kJump : Trust::kNone;
  }
  if (xxh64(data, bytes, 0) != entries->of().digest) return Trust::kNone;
  return in.proof != nullptr ? Trust::kVerify : Trust::kJump;
}

}  // namespace

// Prepares the recording of entries, if the file can have them.
void JpegDecoder::record(size_t bytes, const EntriesOut* out) {
  spacing_ = 0;
  if (out == nullptr) return;
  spacing_ = out->spacing != 0 ? out->spacing : choose_spacing(bytes, mcus_);
  if (spacing_ != 0) state_->entropy.record(spacing_);
}

void JpegDecoder::pack(const uint8_t* data, size_t bytes, EntriesOut* out) {
  if (spacing_ == 0 || !state_->entropy.finish_scan()) return;
  std::vector<EntryPoint>& points = state_->entropy.recorded();
  const EntriesOf of = {xxh64(data, bytes, 0), bytes, scan_begin_, mcus_, spacing_};
  const size_t size = out->spacing == 0 ? pack_fitting(of, &points, out->buffer, out->capacity)
                                        : pack_entries(of, points, out->buffer, out->capacity);
  if (size == 0) return;
  out->written = size;
  if (size > out->capacity) return;
  out->proof = prove(data, bytes, out->buffer, size);
  ++stats_.entries_made;
}

void JpegDecoder::make_entries(const uint8_t* data, size_t bytes, EntriesOut* out) {
  jpeg_check(data, bytes);
  JpegState* state = state_.get();
  const End end_image{state};
  if (!open(state, data, bytes, nullptr)) throw_failure(*state);
  if (!attach(data, bytes)) return;
  record(bytes, out);
  pack(data, bytes, out);
}

size_t JpegDecoder::transcode(const uint8_t* data, size_t bytes, uint8_t* buffer, size_t capacity) {
  jpeg_check(data, bytes);
  JpegState* state = state_.get();
  const End end_image{state};
  Writing to = {};
  to.codec.err = &state->errors;
  to.codec.client_data = state;
  to.to = {buffer, capacity, no_step, out_of_room, no_step};
  const bool written = capacity != 0 && ts::image::transcode(state, data, bytes, &to);
  jpeg_destroy_compress(&to.codec);
  return written ? capacity - to.to.free_in_buffer : 0;
}

size_t JpegDecoder::encode(const Rows& rows, int quality, uint8_t* buffer, size_t capacity) {
  JpegState* state = state_.get();
  Writing to = {};
  to.codec.err = &state->errors;
  to.codec.client_data = state;
  to.to = {buffer, capacity, no_step, out_of_room, no_step};
  const bool written = capacity != 0 && ts::image::encode(state, rows, quality, &to);
  jpeg_destroy_compress(&to.codec);
  if (!written && capacity != 0 && state->errors.msg_code != JERR_CANT_SUSPEND) {
    throw Failure(state->failure, std::string("JPEG: ") + state->text);
  }
  return written ? capacity - to.to.free_in_buffer : 0;
}

void JpegDecoder::open_image(const uint8_t* data, size_t bytes, const Box& box) {
  JpegState* state = state_.get();
  if (!open(state, data, bytes, &box)) throw_failure(*state);
}

// Reads the rows with our entropy decoder, which uses the entries as far as they are trusted.
// Returns false if the decoder gave up, because the file is damaged or unusual, or the entries are
// wrong.
bool JpegDecoder::decode_own(size_t bytes, const Box& box, Resizer* sink, Trust trust,
                             const Entries& entries, const EntriesOut* out) {
  EntropyDecoder& entropy = state_->entropy;
  if (trust == Trust::kJump) entropy.use(&entries);
  if (trust == Trust::kVerify) entropy.verify(&entries);
  if (trust == Trust::kNone) record(bytes, out);
  return rows(box, sink);
}

// Finishes the entries after a decode of our own: packs them, proves them, or counts their use.
void JpegDecoder::settle(const uint8_t* data, size_t bytes, Trust trust, const EntriesIn* in,
                         EntriesOut* out) {
  switch (trust) {
    case Trust::kNone:
      if (out != nullptr) pack(data, bytes, out);
      break;
    case Trust::kVerify:
      if (state_->entropy.finish_scan()) {
        *in->proof = prove(data, bytes, in->blob, in->bytes);
        ++stats_.entries_verified;
      } else {
        ++stats_.entries_refused;
      }
      break;
    case Trust::kJump:
      ++stats_.entries_used;
      break;
  }
}

void JpegDecoder::decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink,
                         const EntriesIn* in, EntriesOut* out) {
  const End end_image{state_.get()};
  counted_ = false;
  Entries entries;
  Trust trust = in == nullptr ? Trust::kNone : judge(*in, data, bytes, &entries);
  // A file from which entries were made has passed the check.
  if (trust != Trust::kJump) jpeg_check(data, bytes);
  open_image(data, bytes, box);
  const bool own = attach(data, bytes);
  if (trust != Trust::kNone &&
      (!own || entries.of().scan != scan_begin_ || entries.of().mcus != mcus_)) {
    if (trust == Trust::kJump) jpeg_check(data, bytes);
    trust = Trust::kNone;
  }
  if (in != nullptr && trust == Trust::kNone) ++stats_.entries_refused;
  if (own) {
    if (decode_own(bytes, box, sink, trust, entries, out)) {
      ++stats_.own;
      counted_ = true;
      settle(data, bytes, trust, in, out);
      return;
    }
    // Starts again without entries, with libjpeg-turbo, whose verdict is final.
    ++stats_.gave_up;
    if (trust != Trust::kNone) ++stats_.entries_refused;
    if (trust == Trust::kJump) jpeg_check(data, bytes);
    end(state_.get());
    sink->restart();
    open_image(data, bytes, box);
    state_->own = false;
  }
  ++stats_.libjpeg;
  counted_ = true;
  rows(box, sink);
}

namespace {

// Reports whether the frame belongs to the image that the geometry was checked with. The header
// comes from another parser, and a plan's accesses stay inside its image only if both read the
// same.
bool is_frame_of(const ts_image_info& header, const Frame& frame) {
  return frame.width == header.width && frame.height == header.height &&
         frame.components == header.components;
}

}  // namespace

size_t JpegDecoder::plan(const uint8_t* data, size_t bytes, const ts_image_info& header,
                         const ts_image_geometry& geometry, const EntriesIn& in, PlanMemory* to) {
  Entries entries;
  // Entries that are not verified yet are verified by a decode, not here.
  if (judge(in, data, bytes, &entries) != Trust::kJump) return 0;
  Frame frame;
  Scan scan;
  const auto planned = [&] {
    const bool same = is_frame_of(header, frame) && entries.of().scan == scan.begin &&
                      entries.of().mcus == uint64_t{scan.mcus_per_row} * scan.mcu_rows;
    return same ? plan_jpeg(frame, scan, entries, geometry, to) : 0;
  };
  if (read_frame(data, bytes, bytes, &tables_, &frame, &scan)) return planned();
  JpegState* state = state_.get();
  const End end_image{state};
  open_image(data, bytes, {0, 0, header.width, header.height});
  if (!describe_scan(state->codec, data, bytes, tables_.codes, &scan) ||
      !frame_of(state->codec, &frame)) {
    return 0;
  }
  return planned();
}

size_t JpegDecoder::plan_head(const FileHead& head, const ts_image_info& header,
                              const ts_image_geometry& geometry, const EntriesIn& in,
                              PlanMemory* to, FilePart* part) {
  Entries entries;
  Frame frame;
  Scan scan;
  if (!entries.attach(in.blob, in.bytes) || entries.of().bytes != head.file_bytes ||
      entries.of().scan != head.scan || head.scan >= head.file_bytes ||
      !read_frame(head.data, head.bytes, head.file_bytes, &tables_, &frame, &scan) ||
      !is_frame_of(header, frame) ||
      entries.of().mcus != uint64_t{scan.mcus_per_row} * scan.mcu_rows) {
    return 0;
  }
  scan.data = nullptr;
  scan.begin = head.scan;
  scan.end = head.file_bytes;
  return plan_jpeg(frame, scan, entries, geometry, to, part);
}

size_t JpegDecoder::plan_scan(const uint8_t* data, size_t bytes, const ts_image_info& header,
                              const ts_image_geometry& geometry, PlanMemory* to,
                              const ScanOptions& options) {
  jpeg_check(data, bytes);
  Frame frame;
  Scan scan;
  const auto planned = [&] {
    return is_frame_of(header, frame) ? plan_whole_scan(frame, scan, geometry, options, to) : 0;
  };
  if (read_frame(data, bytes, bytes, &tables_, &frame, &scan)) return planned();
  JpegState* state = state_.get();
  const End end_image{state};
  open_image(data, bytes, {0, 0, header.width, header.height});
  if (!describe_scan(state->codec, data, bytes, tables_.codes, &scan) ||
      !frame_of(state->codec, &frame)) {
    return 0;
  }
  return planned();
}

namespace {

// Reports, after a whole decode, whether the file's end is missing and pixels with it.
bool cut_off(const JpegState& state) {
  if (!state.ended) return false;
  const jpeg_decompress_struct& codec = state.codec;
  // A single scan lacks pixels only if it lacked bits. Of several scans, whole ones may be missing.
  // Only a progressive image shows that: its coefficients lack bits. Any other image counts as
  // truncated.
  return state.cut || (jpeg_has_multiple_scans(const_cast<j_decompress_ptr>(&codec)) != 0 &&
                       (!codec.progressive_mode || smooths(&codec)));
}

}  // namespace

void JpegDecoder::decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                                 Resizer* sink) {
  JpegState* state = state_.get();
  const End end_image{state};
  if (!counted_) ++stats_.libjpeg;
  counted_ = true;
  state->own = false;
  state->tolerant = true;
  sink->restart();
  open_image(data, bytes, box);
  rows(box, sink);
  if (partial) return;
  if (cut_off(*state)) throw_damage("truncated JPEG: the image data ends early", bytes);
  // A marker that libjpeg does not know ends a scan, and the rows after it are grey. libjpeg
  // reports that marker only here.
  if (!finish(state)) throw_failure(*state);
}

}  // namespace ts::image

const char* ts_jpeg_version(void) { return "libjpeg-turbo " TS_VALUE(LIBJPEG_TURBO_VERSION); }
