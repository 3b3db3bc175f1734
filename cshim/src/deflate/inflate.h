// Raw deflate (RFC 1951), resumable at any byte of input and output, that can also be entered in
// the middle: at the beginning of a block, given the bytes before it that later matches copy from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/instructions.h"

namespace ts::image {

constexpr size_t kWindow = 32768;

class Inflater {
 public:
  // Where a stream can be entered again: at the beginning of a block.
  struct Checkpoint {
    uint64_t bit = 0;     // from the stream's first one
    uint64_t output = 0;  // bytes of output before it
    std::array<uint8_t, kWindow> window;
    // Which bytes of the window are copied from afterwards, as bits. The others do not matter.
    std::array<uint64_t, kWindow / 64> used;
  };
  struct Progress {
    size_t consumed = 0;
    size_t produced = 0;
    bool done = false;  // the stream has ended
  };

  // With spacing > 0 the beginnings of blocks that are at least so many bytes of output apart
  // become checkpoints.
  explicit Inflater(uint64_t spacing, Instructions instructions = best_instructions());

  // Begins a stream, or enters one: `history` bytes of output come before it in the buffer of the
  // next run, and `skip_bits` (0 to 7) of the first byte of input belong to what comes before.
  void reset(uint32_t skip_bits, size_t history);

  // Inflates into buffer[begin, end). Before begin the buffer holds the output so far, as much as
  // there is of it up to kWindow. Input that is not consumed has to be passed again, with what
  // comes after it; there is always progress if 1 KB of input, or with `last` whatever is left, and
  // a byte of room are there. With `last`, input that ends within the stream is an error.
  Progress run(const uint8_t* input, size_t bytes, bool last, uint8_t* buffer, size_t begin,
               size_t end);

  // The next finished checkpoint: they come 32 KB of output after their position, or when the
  // stream ends. NULL: there is none. Valid until the next call. Those that nobody asks for are
  // bounded: no new ones are made then.
  const Checkpoint* next_checkpoint();

 private:
  enum class State : uint8_t { kHeader, kStored, kCoded, kDone };

  // Bits that are read and not consumed, and the bytes after them.
  struct Input {
    const uint8_t* next;
    const uint8_t* end;
    uint64_t bits;
    uint32_t count;
    bool last;

    void refill();
    uint32_t take(uint32_t n);
    void give_back();  // whole bytes
  };
  struct Output {
    uint8_t* next;
    uint8_t* begin;
    uint8_t* end;
    uint64_t offset;  // of begin in the stream
    size_t history;   // how far back from begin matches may reach

    uint64_t at() const { return offset + static_cast<uint64_t>(next - begin); }
    size_t reach() const { return history + static_cast<size_t>(next - begin); }
  };

  bool block_header(Input* in, const Output& out, uint64_t bit);
  void dynamic_header(Input* in);
  void fixed_header();
  bool stored(Input* in, Output* out);
  bool coded(Input* in, Output* out);
  void coded_fast(Input* in, Output* out);
  void coded_fast_any(Input* in, Output* out);
  void coded_fast_baseline(Input* in, Output* out);
  void coded_fast_bmi2(Input* in, Output* out);
  void mark(uint64_t source, uint32_t length);
  void finish_checkpoints(uint64_t output, bool all);

  State state_ = State::kHeader;
  bool final_ = false;
  bool fixed_ready_ = false;  // the tables hold the fixed codes
  uint32_t skip_ = 0;         // bits of the first byte
  bool first_ = true;         // nothing was read yet
  uint64_t bits_ = 0;         // read and not consumed, fewer than 8
  uint32_t count_ = 0;
  uint32_t left_ = 0;      // of a stored block, or of a match
  uint32_t distance_ = 0;  // of that match
  size_t history_ = 0;     // bytes of output that matches may reach, up to kWindow
  uint64_t consumed_ = 0;  // bytes of input, those in bits_ included
  uint64_t output_ = 0;    // bytes of output

  Instructions instructions_;
  uint64_t spacing_;
  uint64_t last_checkpoint_ = 0;
  uint64_t open_end_ = 0;  // the position of the youngest open checkpoint; 0: none is open
  std::deque<std::unique_ptr<Checkpoint>> open_, finished_;
  std::unique_ptr<Checkpoint> taken_;
  std::vector<std::unique_ptr<Checkpoint>> spare_;

  // Root tables of 11 and 9 bits with their second-level tables behind: 2342 and 594 entries at
  // most.
  std::array<uint32_t, 2400> litlen_;
  std::array<uint32_t, 640> dist_;
};

}  // namespace ts::image
