// Decodes JPEG with libjpeg-turbo to the pixels of Pillow and torchvision, and no more of them than
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

struct JpegState;  // libjpeg's state for one image

// Counts images by decode path.
struct JpegStats {
  int64_t own = 0;           // by our own Huffman decoder
  int64_t libjpeg = 0;       // by libjpeg-turbo only: unusual files, and those counted by gave_up
  int64_t gave_up = 0;       // our decoder found damage, or an anomaly that no header shows
  int64_t entries_used = 0;  // of own: decoding jumped to entries
  int64_t entries_verified = 0;  // of own: all entries were compared with the scan
  int64_t entries_refused = 0;   // the given entries were wrong, or of another file
  int64_t entries_made = 0;
};

// The entries to decode with.
struct EntriesIn {
  const uint8_t* blob;
  size_t bytes;
  // The proof that the entries were verified in this process. If *proof is 0, every entry is
  // compared with the scan, and *proof is set if all are right. Any other value must be the proof
  // of this file and blob. With NULL the blob's digests are enough.
  uint64_t* proof;
};

// The entries to make.
struct EntriesOut {
  uint32_t spacing;  // 0: the decoder chooses
  uint8_t* buffer;
  size_t capacity;
  size_t written = 0;  // more than the capacity: the size needed; 0: the file gets no entries
  uint64_t proof = 0;  // as in EntriesIn
};

// The part of a file before its scan's data, or as much of it as a decoder needs.
struct FileHead {
  const uint8_t* data;
  size_t bytes;
  // The whole file's size, and the byte where the scan's data starts.
  size_t file_bytes, scan;
};

// Returns a digest of a file, or of a part of one, from which the proof of its entries is made. It
// is valid while the process runs, and cannot be forged without the process's secret.
uint64_t proof_of_file(const uint8_t* data, size_t bytes);
// Returns the proof that the entries of this blob belong to the file with that proof.
uint64_t proof_of_entries(uint64_t file, const uint8_t* blob, size_t bytes);

// Rows of RGB pixels.
struct Rows {
  const uint8_t* pixels;
  int width, height;
  size_t stride;  // in bytes
};

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

  // Decodes an image that decode has refused as damaged, with libjpeg-turbo only, and accepts all
  // damage that libjpeg-turbo repairs with a warning. Decodes the whole image, so that neither the
  // verdict nor a pixel depends on the box. With partial, missing rows are grey. Without it, a
  // truncated image fails. Throws Failure.
  void decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                      Resizer* sink);

  // Makes entries without decoding pixels. Throws Failure if jpeg_check refuses the file, or
  // libjpeg-turbo cannot start to decode it.
  void make_entries(const uint8_t* data, size_t bytes, EntriesOut* out);

  // Rewrites a progressive JPEG as a baseline one with the same coefficients, quantisers and frame,
  // and therefore the same pixels, but without metadata. Returns its size in bytes. Returns 0 for
  // any other file, for a file that is damaged or lacks coefficients, for coefficients that a
  // baseline file cannot hold, and if the capacity does not exceed the size. Throws Failure if
  // jpeg_check refuses the file.
  size_t transcode(const uint8_t* data, size_t bytes, uint8_t* buffer, size_t capacity);

  // Encodes pixels as a baseline JPEG (4:2:0). Returns its size in bytes, or 0 if the capacity does
  // not exceed the size. Throws Failure for other failures, such as no memory.
  size_t encode(const Rows& rows, int quality, uint8_t* buffer, size_t capacity);

  // Plans the decoding of the image's crop from its entries for another decoder, as plan_jpeg does
  // (image/jpeg_plan.h). The geometry applies to the upright image, and is valid for an image of
  // this header. Returns 0 also if the file's frame differs from the header's, and unless the
  // entries are proven, or trusted without a proof. Throws Failure if libjpeg-turbo cannot start to
  // decode the image.
  size_t plan(const uint8_t* data, size_t bytes, const ts_image_info& header,
              const ts_image_geometry& geometry, const EntriesIn& in, PlanMemory* to);

  // Plans the decoding of the image's crop as plan_jpeg does without the scan's data, from entries
  // that the caller knows to belong to the file. The geometry is valid for an image of this header.
  // Returns 0 also for an unusual head, or one whose frame differs from the header's.
  size_t plan_head(const FileHead& head, const ts_image_info& header,
                   const ts_image_geometry& geometry, const EntriesIn& in, PlanMemory* to,
                   FilePart* part = nullptr);

  // Plans the decoding of the image's crop without entries, as plan_whole_scan does. Otherwise like
  // plan, except that it throws Failure also if jpeg_check refuses the file.
  size_t plan_scan(const uint8_t* data, size_t bytes, const ts_image_info& header,
                   const ts_image_geometry& geometry, PlanMemory* to,
                   const ScanOptions& options = {});

  // Reports whether our own entropy decoder is used for the images that it can decode. It is not
  // used if the linked libjpeg has another layout than the one it was written for.
  bool own() const { return own_; }
  void set_own(bool own) { own_ = own && works(); }

  const JpegStats& stats() const { return stats_; }

  // How far entries are trusted: not at all, for comparison with the scan, or for jumps over MCUs
  // that are not needed.
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
  Tables tables_;              // the image's tables, as in the file
  bool own_ = false;
  size_t scan_begin_ = 0;
  uint64_t mcus_ = 0;
  uint32_t spacing_ = 0;  // spacing of the recorded entries; 0: none are recorded
  bool counted_ = false;  // stats_ has counted the last decode
  JpegStats stats_;
};

}  // namespace ts::image
