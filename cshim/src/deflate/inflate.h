// Inflates raw deflate (RFC 1951). Inflating can pause at any byte of input and output. It can also
// start in the middle of a stream: at the start of a block, given the bytes of output before it
// that later matches copy from.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/instructions.h"
#include "deflate/codes.h"
#include "deflate/guess.h"
#include "deflate/unknown.h"

namespace ts::image {

constexpr size_t kWindow = 32768;
constexpr size_t kGap = 3;  // see Checkpoint::used

class Inflater {
 public:
  // The start of a block, where inflating can resume.
  struct Checkpoint {
    uint64_t bit = 0;     // of the stream, from its first bit
    uint64_t output = 0;  // bytes of output before it
    std::array<uint8_t, kWindow> window;
    // A bit for each byte of the window: whether later output copies that byte. The window has
    // these bytes and the kGap bytes after each. The others are undefined.
    std::array<uint64_t, kWindow / 64> used;
  };
  struct Progress {
    size_t consumed = 0;
    size_t produced = 0;
    bool done = false;  // the stream has ended
  };

  // With spacing > 0, the starts of blocks that are at least `spacing` bytes of output apart become
  // checkpoints.
  explicit Inflater(uint64_t spacing, Instructions instructions = best_instructions());

  // Starts a stream, or resumes at a checkpoint: `history` bytes of earlier output precede the
  // range of the next run in its buffer, and the first `skip_bits` bits (0 to 7) of the first byte
  // of input belong to the previous block.
  void reset(uint32_t skip_bits, size_t history);

  // Like reset, for output whose window comes later. With history == kWindow the stream is entered
  // with an unknown window, and positions of output count from kWindow. With history == 0 a stream
  // starts, and positions count from 0. Every block start is a checkpoint, without a window. Until
  // settle is called, at most 64 of them wait at a time.
  void follow(uint32_t skip_bits, size_t history);
  // Ends what follow has started. The window is now in the buffer, the output up to buffer[end) is
  // right, and its last byte is the last one that a run produced. Later checkpoints have windows,
  // and are at least `spacing` bytes apart. `last` is the position of the checkpoint before them.
  void settle(const uint8_t* buffer, size_t end, uint64_t spacing, uint64_t last);
  // Finishes the checkpoints at a block start where another inflater continues, which has copied
  // these bytes. At least kWindow bytes of its output are known, or its whole output. The window
  // has the last kWindow bytes before it.
  void finish(const uint8_t* window, const ts_inflate_copy* copies, size_t count);
  // Makes run return at the first block that starts at this bit or after it, until reset.
  void stop_at(uint64_t bit) { stop_ = bit; }
  ts_inflate_state state() const;

  // Inflates into buffer[begin, end). Below that range the buffer holds the output so far, at least
  // its last kWindow bytes. The caller passes input that was not consumed again, together with the
  // bytes after it. A run makes progress if it gets a byte of room and 1 KB of input, or with
  // `last` the rest of the input. With `last`, input that ends within the stream is an error.
  Progress run(const uint8_t* input, size_t bytes, bool last, uint8_t* buffer, size_t begin,
               size_t end);

  // Returns the next finished checkpoint, valid until the next call, or NULL if there is none. A
  // checkpoint is finished 32 KB of output after its position, or when the stream ends. The number
  // of finished checkpoints is bounded: at the bound no new ones are made.
  const Checkpoint* next_checkpoint();

  // Returns the bytes of output that were decoded from guesses (guess.h).
  uint64_t guessed() const { return guessed_; }

 private:
  // Maximum input bytes that an iteration of the fast loop reads.
  static constexpr ptrdiff_t kFastInput = 32;
  // Maximum output bytes that an iteration writes: literals, a match of 258, and the excess of
  // copying.
  static constexpr ptrdiff_t kFastOutput = 320;
  static constexpr const char* kBeyondBeginning = "a distance beyond the beginning";

  enum class State : uint8_t { kHeader, kStored, kCoded, kDone };

  // What the chains may read and write.
  struct Bounds {
    const uint8_t* base;  // positions in bits count from here
    const uint8_t* in_end;
    const uint8_t* out_end;
  };
  struct Output {
    uint8_t* next;
    uint8_t* begin;
    uint8_t* end;
    uint64_t offset;  // position of the range in the stream's output
    size_t history;   // number of bytes below the range that matches may copy

    uint64_t at() const { return offset + static_cast<uint64_t>(next - begin); }
    size_t reach() const { return history + static_cast<size_t>(next - begin); }
  };

  bool block_header(BitReader* in, const Output& out, uint64_t bit);
  bool stored(BitReader* in, Output* out);
  bool coded(BitReader* in, Output* out);
  void coded_fast(BitReader* in, Output* out);
  void coded_fast_any(BitReader* in, Output* out);
  void coded_fast_baseline(BitReader* in, Output* out);
  void coded_fast_bmi2(BitReader* in, Output* out);
  void mark(uint64_t source, uint32_t length, uint32_t distance, const uint8_t* bytes);
  static void copy_match(uint8_t* out, uint32_t length, uint32_t distance);

  // In chains.cc.
  size_t chain_span(const BitReader& in, const Output& out) const;
  void coded_chains(size_t span, BitReader* input, Output* output);
  void coded_chains_any(size_t span, BitReader* input, Output* output);
  void coded_chains_baseline(size_t span, BitReader* input, Output* output);
  void coded_chains_bmi2(size_t span, BitReader* input, Output* output);
  void coded_until(const uint8_t* until, BitReader* input, Output* output);
  template <size_t N>
  size_t step(const Bounds& bounds, Chain* chains, Output* output);
  bool first_symbol(Chain* chain, Output* output);
  bool copy(uint32_t length, uint32_t distance, Output* output);
  const Guess::Place* meet(const Bounds& bounds, const Guess& guess, Chain* chain, Output* output);
  bool append(const Guess& guess, const Guess::Place& from, const uint8_t* literals_end,
              const uint8_t* out_end, Output* output);
  uint64_t watched() const { return std::max(open_end_, unknown_.end()); }
  std::unique_ptr<Checkpoint> spare();
  bool wants_checkpoint(uint64_t at);
  void finish_checkpoints(uint64_t output, bool all);

  State state_ = State::kHeader;
  bool final_ = false;
  uint32_t skip_ = 0;  // bits of the first byte to skip
  bool first_ = true;  // no input was read yet
  uint64_t bits_ = 0;  // bits read but not consumed, fewer than 8
  uint32_t count_ = 0;
  uint32_t left_ = 0;      // bytes left of a stored block, or of a match
  uint32_t distance_ = 0;  // distance of that match
  size_t history_ = 0;     // bytes of output that matches may copy, up to kWindow
  uint64_t consumed_ = 0;  // bytes of input, including the bits in bits_
  uint64_t output_ = 0;    // bytes of output

  Instructions instructions_;
  uint64_t spacing_;
  uint64_t last_checkpoint_ = 0;
  uint64_t open_end_ = 0;  // output offset of the newest open checkpoint; 0 if none is open
  uint64_t stop_ = UINT64_MAX;
  bool following_ = false;
  bool lacking_ = false;  // a checkpoint is missing, since too many waited
  UnknownWindow unknown_;
  std::deque<std::unique_ptr<Checkpoint>> open_, finished_;
  std::unique_ptr<Checkpoint> taken_;
  std::vector<std::unique_ptr<Checkpoint>> spare_;

  Codes codes_;

  std::vector<Guess> guesses_;
  size_t steps_ = 0;        // of the chains
  uint64_t guessed_ = 0;    // see guessed
  uint32_t misses_ = 0;     // wrong guesses in this block
  size_t block_used_ = 0;   // bytes of input of this block, about
  size_t block_bytes_ = 0;  // of the previous block with codes
};

}  // namespace ts::image
