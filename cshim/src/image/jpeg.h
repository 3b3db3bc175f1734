// Decodes JPEG with libjpeg-turbo to the pixels of Pillow and torchvision, and only as many as are
// needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "image/entries.h"
#include "image/jpeg_frame.h"
#include "image/jpeg_plan.h"
#include "image/resize.h"
#include "torchstream_image.h"

namespace ts::image {

bool is_jpeg(const uint8_t* data, size_t bytes);

// Reads the segments up to the frame header, and skips the damage that libjpeg skips with a
// warning. Throws Failure: DECODE or UNSUPPORTED.
ts_image_info jpeg_header(const uint8_t* data, size_t bytes);

// Checks the whole file without decoding it, so that the damage found does not depend on the part
// of the image that is decoded. Throws Failure (DECODE) unless its segments, restart markers and
// end marker are correct. Ignores bytes after the end marker. Takes about 0.01 ms for 100 KB.
void jpeg_check(const uint8_t* data, size_t bytes);

struct JpegState;  // libjpeg's state of one image

// Counts images by the way they were decoded.
struct JpegStats {
  int64_t own = 0;               // by our own Huffman decoder
  int64_t libjpeg = 0;           // by libjpeg-turbo alone: unusual files, and those of gave_up
  int64_t gave_up = 0;           // our decoder met damage, or an anomaly that no header shows
  int64_t entries_used = 0;      // of own: decoding jumped to entries
  int64_t entries_verified = 0;  // of own: all entries were compared with the scan
  int64_t entries_refused = 0;   // the given entries were another file's, or wrong
  int64_t entries_made = 0;
};

// The entries to decode with.
struct EntriesIn {
  const uint8_t* blob;
  size_t bytes;
  // The proof that the entries were verified in this process. If *proof is 0, every entry is
  // compared with the scan, and *proof is set if all are right. Any other value must be the proof
  // of this file and blob. With NULL the blob's digests are proof enough.
  uint64_t* proof;
};

// The entries to make.
struct EntriesOut {
  uint32_t spacing;  // 0: the decoder chooses
  uint8_t* buffer;
  size_t capacity;
  size_t written = 0;  // over the capacity: the size needed; 0: the file gets no entries
  uint64_t proof = 0;  // as in EntriesIn
};

// What a file has in front of its scan's data, or as much of that as a decoder needs.
struct FileHead {
  const uint8_t* data;
  size_t bytes;
  // Of the whole file: its size, and the byte where the scan's data begin.
  size_t file_bytes, scan;
};

// Returns a digest of a file, with which a proof of its entries begins, or of a part of one. It is
// valid as long as the process lives, and cannot be forged without its secret.
uint64_t proof_of_file(const uint8_t* data, size_t bytes);
// Returns the proof that the entries of this blob are those of the file with that proof.
uint64_t proof_of_entries(uint64_t file, const uint8_t* blob, size_t bytes);

class JpegDecoder {
 public:
  explicit JpegDecoder(int64_t max_pixels);
  ~JpegDecoder();
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Decodes the box, which must be inside the image, and pushes its rows to the sink. `in` and
  // `out` may be NULL. `out` is ignored if `in` is used. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink,
              const EntriesIn* in = nullptr, EntriesOut* out = nullptr);

  // Decodes an image that decode has refused as damaged, with libjpeg-turbo alone, and accepts all
  // damage that libjpeg-turbo repairs with a warning. Decodes the whole image, so that neither the
  // verdict nor a pixel depends on the box. With partial, rows that the file lacks are grey.
  // Without it, an image that is cut off fails. Throws Failure.
  void decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                      Resizer* sink);

  // Makes entries without decoding pixels. Throws Failure if jpeg_check refuses the file, or
  // libjpeg-turbo cannot start to decode it.
  void make_entries(const uint8_t* data, size_t bytes, EntriesOut* out);

  // Writes a progressive JPEG as a baseline one with the same coefficients, quantisers and frame,
  // which therefore decodes to the same pixels, and without metadata. Returns its bytes, or 0 for
  // any other file, one that is damaged or lacks coefficients, coefficients that a baseline file
  // cannot have, and a capacity that is not over the bytes. Throws Failure if jpeg_check refuses
  // the file.
  size_t transcode(const uint8_t* data, size_t bytes, uint8_t* buffer, size_t capacity);

  // Plans the decoding of the image's crop from its entries for another decoder, as plan_jpeg does
  // (image/jpeg_plan.h). The geometry is that of the upright image, and valid for an image of this
  // header. Returns 0 also for a file whose frame is another than the header's, and unless the
  // entries are proven, or trusted without a proof. Throws Failure if libjpeg-turbo cannot start to
  // decode the image.
  size_t plan(const uint8_t* data, size_t bytes, const ts_image_info& header,
              const ts_image_geometry& geometry, const EntriesIn& in, PlanMemory* to);

  // Plans the decoding of the image's crop as plan_jpeg does without the scan's data, from entries
  // that the caller knows to be those of the file. The geometry is valid for an image of this
  // header. Returns 0 also for a head that is not usual, or has another frame than the header's.
  size_t plan_head(const FileHead& head, const ts_image_info& header,
                   const ts_image_geometry& geometry, const EntriesIn& in, PlanMemory* to,
                   FilePart* part = nullptr);

  // Plans the decoding of the image's crop without entries, as plan_whole_scan does. Otherwise this
  // is plan; but throws Failure also if jpeg_check refuses the file.
  size_t plan_scan(const uint8_t* data, size_t bytes, const ts_image_info& header,
                   const ts_image_geometry& geometry, PlanMemory* to,
                   const ScanOptions& options = {});

  // Reports whether our own entropy decoder is used for the images that it can decode. It is not
  // used if the linked libjpeg has another layout than the one that it was written for.
  bool own() const { return own_; }
  void set_own(bool own) { own_ = own && works(); }

  const JpegStats& stats() const { return stats_; }

  // The use that entries are trusted for: none, comparison with the scan, or jumps over MCUs that
  // are not needed.
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
  Tables tables_;              // the image's, as the file has them
  bool own_ = false;
  size_t scan_begin_ = 0;
  uint64_t mcus_ = 0;
  uint32_t spacing_ = 0;  // of the entries that are recorded; 0: none are
  bool counted_ = false;  // stats_ has counted the last decode
  JpegStats stats_;
};

}  // namespace ts::image
