// Huffman decoding of a baseline JPEG scan, faster than libjpeg's and able to start in the middle.
//
// It decodes exactly what libjpeg-turbo decodes, or gives up: on the first thing that is unusual (a
// bad code, a scan that ends early, a marker out of turn) next() returns false, nothing is promised
// about the image, and the caller decodes it again by libjpeg-turbo, whose verdict then stands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/instructions.h"
#include "image/entries.h"

namespace ts::image {

constexpr int kMostBlocks = 10;  // of an MCU, by the standard

// As in the file: how many codes there are of each length from 1 to 16, and their symbols in order.
struct HuffmanCode {
  uint8_t counts[17];  // [0] is not used
  uint8_t symbols[256];
};

// One scan of all components with spectral range 0 to 63, and where its bits are.
struct Scan {
  const uint8_t* data;  // the file
  size_t begin, end;    // the scan's first byte; the file's end
  int components;
  int blocks;                      // of an MCU
  uint8_t component[kMostBlocks];  // of each block
  uint8_t dc_table[kMostBlocks];   // of each block: index into dc
  uint8_t ac_table[kMostBlocks];   // of each block: index into ac
  const HuffmanCode* dc[4];        // what is used is there
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

  // Starts an image: memory is taken here, and only here. False: not for this decoder.
  bool start(const Scan& scan);

  // Columns of MCUs, both included, whose coefficients are wanted. All of them without this call.
  void want(uint32_t first_column, uint32_t last_column);

  // Uses the entries (borrowed until the image's end; checked by their own digests) to jump over
  // MCUs outside the wanted columns. An entry that decoding passes over must agree, or next() gives
  // up.
  void use(const Entries* entries);

  // Notes an entry before every spacing-th MCU. Memory is taken here.
  void record(uint32_t spacing);

  // Checks every entry on the way, and jumps nowhere.
  void verify(const Entries* entries);

  // The next MCU in raster order. blocks: zeroed, one pointer a block, coefficients in natural
  // order; NULL: not wanted. Blocks outside the wanted columns are left alone. False: gave up.
  bool next(int16_t (*const* blocks)[64]);

  // Decodes what next() was asked for and left out: damage there is damage. False: gave up.
  bool finish();

  // Decodes up to the scan's end. False: gave up.
  bool finish_scan();

  uint64_t decoded() const { return at_ == kNowhere ? 0 : at_; }  // MCUs, skipped ones too
  std::vector<EntryPoint>& recorded() { return recorded_; }       // after finish_scan: all or none

 private:
  struct Bits {
    const uint8_t* at;  // next byte to load, in the window
    uint64_t buffer;    // the next bits, from the top down
    int32_t count;      // of them valid; those below are either zero or valid too
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
  const DcTable* dc_[kMostBlocks] = {};
  const AcTable* ac_[kMostBlocks] = {};
  const Instructions instructions_;

  static constexpr uint64_t kNowhere = UINT64_MAX;

  // What next() was asked for, and what is decoded: at_ is behind called_ when MCUs were left out.
  uint64_t mcus_ = 0, called_ = 0, at_ = 0;
  uint32_t column_ = 0, first_column_ = 0, last_column_ = 0;
  int32_t predictor_[kMostComponents] = {};
  uint32_t restarts_to_go_ = 0;
  int32_t next_restart_ = 0;

  // A window of the scan without its stuffed bytes.
  std::unique_ptr<uint8_t[]> window_;
  Bits bits_ = {};
  size_t filled_ = 0;     // bytes in the window
  size_t reserve_ = 0;    // bytes that an MCU may look at
  size_t next_byte_ = 0;  // of the file: the first that is not in the window
  size_t limit_ = 0;      // of the file: loaded up to here
  bool ended_ = false;    // by a marker, or by the limit: zeros follow in the window
  bool marker_ = false;   // by a marker, which is at next_byte_
  // Every 0xFF in the window stands for two bytes in the file.
  size_t counted_ = 0;       // bytes of the window
  size_t counted_file_ = 0;  // where the byte after them is in the file

  const Entries* entries_ = nullptr;
  bool jumps_ = false;
  uint32_t spacing_ = 0;
  uint64_t next_entry_ = 0;  // MCU before which an entry is noted or compared
  bool records_ = false;
  std::vector<EntryPoint> recorded_;

  // Tables are kept from image to image: many files share the standard's.
  std::vector<std::unique_ptr<DcTable>> dc_tables_;
  std::vector<std::unique_ptr<AcTable>> ac_tables_;
  uint64_t clock_ = 0;
};

}  // namespace ts::image
