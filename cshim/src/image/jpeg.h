// JPEG by libjpeg-turbo: the same pixels as Pillow and torchvision, but only those that are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "image/entries.h"
#include "image/jpeg_entropy.h"
#include "image/resize.h"
#include "torchstream_image.h"

namespace ts::image {

bool is_jpeg(const uint8_t* data, size_t bytes);

// Reads the segments up to the frame header, past the damage that libjpeg skips with a warning.
// Throws Failure: DECODE or UNSUPPORTED.
ts_image_info jpeg_header(const uint8_t* data, size_t bytes);

// Walks over the whole file without decoding it and throws Failure (DECODE) unless its segments,
// restart markers and end marker are as they should be: so the damage found does not depend on the
// part of the image that is decoded. Bytes after the end marker are ignored. About 0.01 ms for 100
// KB.
void jpeg_check(const uint8_t* data, size_t bytes);

struct JpegState;  // libjpeg's

// How many images went which way.
struct JpegStats {
  int64_t own = 0;               // Huffman decoding of our own
  int64_t libjpeg = 0;           // all of libjpeg-turbo: unusual files, and those of gave_up
  int64_t gave_up = 0;           // ours met damage, or what no header had announced
  int64_t entries_used = 0;      // of own: entries were jumped to
  int64_t entries_verified = 0;  // of own: all entries were compared with the scan
  int64_t entries_refused = 0;   // entries were given, and were not this file's or not right
  int64_t entries_made = 0;
};

// Entries to decode by.
struct EntriesIn {
  const uint8_t* blob;
  size_t bytes;
  // The proof of "verified in this process". With 0 every entry is compared with the scan, and the
  // proof is set if all are right; any other value must fit. NULL: the blob's digests are enough.
  uint64_t* proof;
};

// Entries to make.
struct EntriesOut {
  uint32_t spacing;  // 0: chosen
  uint8_t* buffer;
  size_t capacity;
  size_t written = 0;  // over the capacity: what it takes; 0: there are none for this file
  uint64_t proof = 0;  // as of EntriesIn
};

class JpegDecoder {
 public:
  explicit JpegDecoder(int64_t max_pixels);
  ~JpegDecoder();
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Decodes the box, which is inside the image, and pushes its rows to the sink; in: may be NULL;
  // out: may be NULL; ignored if `in` is used. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink,
              const EntriesIn* in = nullptr, EntriesOut* out = nullptr);

  // Decodes an image that decode has refused as damaged, with libjpeg-turbo alone and whatever it
  // repairs with a warning. It decodes the whole image, so that neither the verdict nor a pixel
  // depends on the box. partial: rows that the file does not have are grey, too; otherwise an image
  // that is cut off fails. Throws Failure.
  void decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                      Resizer* sink);

  // Makes entries alone. Throws Failure if libjpeg-turbo cannot even begin with the file.
  void make_entries(const uint8_t* data, size_t bytes, EntriesOut* out);

  // Whether our own entropy decoder is used where it can be. It is, unless the linked libjpeg has
  // not the layout that it was written for.
  bool own() const { return own_; }
  void set_own(bool own) { own_ = own && works(); }

  const JpegStats& stats() const { return stats_; }

  // What entries are good for: nothing, comparing with the file, or jumping over what is not
  // needed.
  enum class Trust { kNone, kVerify, kJump };

 private:
  void open_image(const uint8_t* data, size_t bytes, const Box& box);
  bool decode_own(size_t bytes, const Box& box, Resizer* sink, Trust trust, const Entries& entries,
                  const EntriesOut* out);
  void settle(const uint8_t* data, size_t bytes, Trust trust, const EntriesIn* in, EntriesOut* out);
  bool works();
  bool attach(const uint8_t* data, size_t bytes);
  bool rows(const Box& box, Resizer* sink);
  void record(size_t bytes, const EntriesOut* out);
  void pack(const uint8_t* data, size_t bytes, EntriesOut* out);

  std::unique_ptr<JpegState> state_;
  std::vector<uint8_t> band_;  // the rows of one push
  HuffmanCode codes_[2][4];    // of the image, as the file has them
  bool own_ = false;
  size_t scan_begin_ = 0;
  uint64_t mcus_ = 0;
  uint32_t spacing_ = 0;  // of what is recorded; 0: nothing
  bool counted_ = false;  // the last decode is in stats_
  JpegStats stats_;
};

}  // namespace ts::image
