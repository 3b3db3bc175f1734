// Decodes the Huffman codes of a baseline JPEG scan, faster than libjpeg, and from any entry point.
// The decoder returns exactly libjpeg-turbo's coefficients, or gives up: on the first anomaly (a
// bad code, a scan that ends early, an unexpected marker) next() returns false. The coefficients
// are then undefined, and the caller decodes the image again with libjpeg-turbo, whose verdict is
// final.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/instructions.h"
#include "image/entries.h"

namespace ts::image {

constexpr int kMaxBlocks = 10;  // in an MCU, by the standard

// A code as stored in the file: the number of codes of each length from 1 to 16, and their symbols
// in order.
struct HuffmanCode {
  uint8_t counts[17];  // [0] is not used
  uint8_t symbols[256];
};

// One scan of all components with spectral range 0 to 63, and the position of its bits.
struct Scan {
  const uint8_t* data;  // the file
  size_t begin, end;    // the scan's first byte; the file's end
  int components;
  int blocks;                     // in an MCU
  uint8_t component[kMaxBlocks];  // of each block
  uint8_t dc_table[kMaxBlocks];   // of each block: index into dc
  uint8_t ac_table[kMaxBlocks];   // of each block: index into ac
  const HuffmanCode* dc[4];       // NULL: the file lacks the table
  const HuffmanCode* ac[4];
  uint32_t mcus_per_row, mcu_rows;
  uint32_t restart_interval;  // in MCUs; 0: none
};

struct DcTable;
struct AcTable;

class EntropyDecoder {
 public:
  explicit EntropyDecoder(Instructions instructions = best_instructions());
  ~EntropyDecoder();
  EntropyDecoder(const EntropyDecoder&) = delete;
  EntropyDecoder& operator=(const EntropyDecoder&) = delete;

  // Starts an image. Only start and record allocate memory. Returns false if this decoder cannot
  // decode the scan.
  bool start(const Scan& scan);

  // Sets the first and last column of MCUs whose coefficients are wanted. Without this call all
  // are.
  void want(uint32_t first_column, uint32_t last_column);

  // Uses the entries to jump over MCUs outside the wanted columns. The entries are borrowed until
  // the image's end, and only their own digests have been checked. next() gives up if decoding
  // passes over an entry that disagrees.
  void use(const Entries* entries);

  // Records an entry before every spacing-th MCU.
  void record(uint32_t spacing);

  // Compares every entry with the scan, without jumps.
  void verify(const Entries* entries);

  // Decodes the next MCU in raster order. `blocks` has a pointer for each block, to zeroed memory
  // for its coefficients in natural order. With NULL the coefficients are not wanted. Does not
  // write blocks outside the wanted columns. Returns false if the decoder gave up.
  bool next(int16_t (*const* blocks)[64]);

  // Decodes the MCUs that next() skipped, because damage there counts too. Returns false if the
  // decoder gave up.
  bool finish();

  // Decodes up to the scan's end. Returns false if the decoder gave up.
  bool finish_scan();

  uint64_t decoded() const { return at_ == kNowhere ? 0 : at_; }  // MCUs, including skipped ones
  std::vector<EntryPoint>& recorded() { return recorded_; }       // after finish_scan: all or none

 private:
  struct Bits {
    const uint8_t* at;  // next byte to load, in the window
    uint64_t buffer;    // the next bits, from the top down
    int32_t count;      // valid bits; the bits below them are either zero or valid too
  };

  template <bool kStore>
  static bool decode_blocks(EntropyDecoder* self, int16_t (*const* blocks)[64]);
  template <bool kStore>
  static bool decode_blocks_baseline(EntropyDecoder* self, int16_t (*const* blocks)[64]);
  template <bool kStore>
  static bool decode_blocks_bmi2(EntropyDecoder* self, int16_t (*const* blocks)[64]);

  const DcTable* dc_table(const HuffmanCode& code);
  const AcTable* ac_table(const HuffmanCode& code);

  template <bool kStore>
  bool decode(int16_t (*const* blocks)[64]);
  bool advance(uint64_t mcu);
  bool begin_row(uint64_t mcu);
  void seek(const EntryPoint& entry, uint64_t mcu);
  bool restart();
  bool pass_entry();
  void refill_window();
  uint64_t bits_used() const;
  uint64_t position();

  Scan scan_ = {};
  const DcTable* dc_[kMaxBlocks] = {};
  const AcTable* ac_[kMaxBlocks] = {};
  const Instructions instructions_;

  static constexpr uint64_t kNowhere = UINT64_MAX;

  // The MCUs of the image, the number of calls of next(), and the next MCU to decode. at_ is less
  // than called_ if MCUs were skipped.
  uint64_t mcus_ = 0, called_ = 0, at_ = 0;
  uint32_t column_ = 0, first_column_ = 0, last_column_ = 0;
  int32_t predictor_[kMaxComponents] = {};
  uint32_t restarts_to_go_ = 0;
  int32_t next_restart_ = 0;

  // A window of the scan without its stuffed bytes.
  std::unique_ptr<uint8_t[]> window_;
  Bits bits_ = {};
  size_t filled_ = 0;     // bytes in the window
  size_t reserve_ = 0;    // maximum bytes that an MCU may read
  size_t next_byte_ = 0;  // in the file: the first byte that is not in the window
  size_t limit_ = 0;      // in the file: the end of loading
  bool ended_ = false;    // a marker or the limit ended the data: zeros follow in the window
  bool marker_ = false;   // a marker ended the data, and is at next_byte_
  // Every 0xFF in the window represents two bytes in the file.
  size_t counted_ = 0;       // a position in the window
  size_t counted_file_ = 0;  // the same position in the file

  const Entries* entries_ = nullptr;
  bool jumps_ = false;
  uint32_t spacing_ = 0;
  uint64_t next_entry_ = 0;  // the MCU before which the next entry is recorded or compared
  bool records_ = false;
  std::vector<EntryPoint> recorded_;

  // Tables are kept from image to image, because many files share the standard's.
  std::vector<std::unique_ptr<DcTable>> dc_tables_;
  std::vector<std::unique_ptr<AcTable>> ac_tables_;
  uint64_t clock_ = 0;
};

}  // namespace ts::image
