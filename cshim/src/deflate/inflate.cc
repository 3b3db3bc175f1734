#include "deflate/inflate.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "deflate/find.h"
#include "torchstream_image.h"

namespace ts::image {
namespace {

constexpr size_t kMaxFinished = 64;  // maximum number of finished checkpoints

// Sets n bits, n > 0, from bit `at` on.
void set_bits(uint64_t* words, uint64_t at, uint64_t n) {
  const uint64_t last = at + n - 1;
  const uint64_t from = ~uint64_t{0} << (at % 64);
  const uint64_t to = ~uint64_t{0} >> (63 - last % 64);
  uint64_t* const end = words + last / 64;
  words += at / 64;
  if (words == end) {
    *words |= from & to;
    return;
  }
  *words++ |= from;
  while (words < end) *words++ = ~uint64_t{0};
  *end |= to;
}

}  // namespace

void Inflater::copy_match(uint8_t* out, uint32_t length, uint32_t distance) {
  const uint8_t* from = out - distance;
  uint8_t* const end = out + length;
  if (distance >= 16) {
    do {
      std::memcpy(out, from, 16);
      out += 16;
      from += 16;
    } while (out < end);
  } else if (distance >= 8) {
    do {
      std::memcpy(out, from, 8);
      out += 8;
      from += 8;
    } while (out < end);
  } else if (distance == 1) {
    std::memset(out, *from, length);
  } else {
    while (out < end) *out++ = *from++;
  }
}

Inflater::Inflater(uint64_t spacing, Instructions instructions)
    : instructions_(instructions), spacing_(spacing) {}

void Inflater::reset(uint32_t skip_bits, size_t history) {
  state_ = State::kHeader;
  final_ = false;
  skip_ = skip_bits;
  first_ = true;
  bits_ = 0;
  count_ = left_ = distance_ = 0;
  history_ = std::min(history, kWindow);
  consumed_ = output_ = last_checkpoint_ = open_end_ = 0;
  stop_ = UINT64_MAX;
  following_ = lacking_ = false;
  unknown_.clear();
  for (auto* list : {&open_, &finished_}) {
    for (auto& c : *list) spare_.push_back(std::move(c));
    list->clear();
  }
}

void Inflater::follow(uint32_t skip_bits, size_t history) {
  require(history == 0 || history == kWindow, "history is neither 0 nor the window");
  reset(skip_bits, history);
  following_ = true;
  spacing_ = 1;
  if (history == 0) return;
  unknown_.start();
  output_ = last_checkpoint_ = kWindow;
}

void Inflater::settle(const uint8_t* buffer, size_t end, uint64_t spacing, uint64_t last) {
  following_ = false;
  unknown_.clear();
  spacing_ = spacing;
  last_checkpoint_ = last;
  open_end_ = 0;
  std::deque<std::unique_ptr<Checkpoint>> open;
  for (auto& c : open_) {
    if (c->output - last_checkpoint_ < spacing_) {
      spare_.push_back(std::move(c));
      continue;
    }
    const size_t before = output_ - c->output;
    require(end >= before + kWindow, "the buffer does not hold a window");
    std::memcpy(c->window.data(), buffer + end - before - kWindow, kWindow);
    last_checkpoint_ = open_end_ = c->output;
    open.push_back(std::move(c));
  }
  open_ = std::move(open);
}

void Inflater::finish(const uint8_t* window, const ts_inflate_copy* copies, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t source = uint64_t{copies[i].at} - copies[i].distance;
    if (source >= kWindow || output_ + source < kWindow) continue;
    mark(output_ + source - kWindow, copies[i].length, copies[i].distance, window + source);
  }
  finish_checkpoints(output_, true);
}

ts_inflate_state Inflater::state() const {
  ts_inflate_state s{};
  s.bit = first_ ? skip_ : 8 * consumed_ - count_;
  s.at_block = state_ == State::kHeader && !final_;
  s.rest = static_cast<uint8_t>(bits_);
  s.lacking = lacking_;
  s.reach = unknown_.reach();
  s.copies = unknown_.copies().data();
  s.copy_count = unknown_.copies().size();
  return s;
}

Inflater::Progress Inflater::run(const uint8_t* input, size_t bytes, bool last, uint8_t* buffer,
                                 size_t begin, size_t end) {
  require(begin >= history_ && begin <= end,
          "the buffer does not hold what matches may copy from, or ends before it begins");
  BitReader in{input, input + bytes, bits_, count_, last, input};
  if (first_ && bytes > 0) {
    in.bits = static_cast<uint64_t>(*in.next++) >> skip_;
    in.count = 8 - skip_;
    first_ = false;
  }
  Output out{buffer + begin, buffer + begin, buffer + end, output_, history_};
  for (bool more = true; more && state_ != State::kDone;) {
    if (open_end_ > 0) finish_checkpoints(out.at(), false);
    switch (state_) {
      case State::kHeader:
        more = block_header(&in, out,
                            8 * (consumed_ + static_cast<uint64_t>(in.next - input)) - in.count);
        break;
      case State::kStored:
        more = stored(&in, &out);
        break;
      default:
        more = coded(&in, &out);
    }
  }
  in.give_back();
  Progress p;
  p.consumed = static_cast<size_t>(in.next - input);
  p.produced = static_cast<size_t>(out.next - out.begin);
  p.done = state_ == State::kDone;
  bits_ = in.bits;
  count_ = in.count;
  consumed_ += p.consumed;
  output_ += p.produced;
  history_ = std::min(history_ + p.produced, kWindow);
  finish_checkpoints(output_, p.done);
  return p;
}

// Reports whether a block that starts at a position of the output becomes a checkpoint.
bool Inflater::wants_checkpoint(uint64_t at) {
  if (spacing_ == 0 || at - last_checkpoint_ < spacing_) return false;
  const bool room = finished_.size() + (following_ ? open_.size() : 0) < kMaxFinished;
  lacking_ = lacking_ || !room;
  return room;
}

std::unique_ptr<Inflater::Checkpoint> Inflater::spare() {
  if (spare_.empty()) return std::make_unique<Checkpoint>();
  auto c = std::move(spare_.back());
  spare_.pop_back();
  return c;
}

// Returns false if it needs more input, or room.
bool Inflater::block_header(BitReader* in, const Output& out, uint64_t bit) {
  if (final_) {
    state_ = State::kDone;
    return true;
  }
  if (out.next == out.end || bit >= stop_) return false;  // the caller may not need the next block
  if (!in->last && in->end - in->next < static_cast<ptrdiff_t>(kHeaderBytes)) return false;
  if (wants_checkpoint(out.at())) {
    auto c = spare();
    c->bit = bit;
    c->output = out.at();
    c->used.fill(0);
    open_.push_back(std::move(c));
    last_checkpoint_ = open_end_ = out.at();
  }
  if (block_used_ > 0) block_bytes_ = block_used_;
  block_used_ = misses_ = 0;
  final_ = in->take(1) == 1;
  switch (in->take(2)) {
    case 0: {
      in->take(in->count & 7);
      const uint32_t length = in->take(16);
      if ((in->take(16) ^ length) != 0xffff) damaged("a stored block's length is damaged");
      in->give_back();
      left_ = length;
      state_ = State::kStored;
      return true;
    }
    case 1:
      codes_.set_fixed();
      break;
    case 2:
      codes_.read(in);
      break;
    default:
      damaged("a block of an unknown type");
  }
  state_ = State::kCoded;
  return true;
}

bool Inflater::stored(BitReader* in, Output* out) {
  const size_t n = std::min({static_cast<size_t>(left_), static_cast<size_t>(in->end - in->next),
                             static_cast<size_t>(out->end - out->next)});
  if (n > 0) std::memcpy(out->next, in->next, n);
  in->next += n;
  out->next += n;
  left_ -= static_cast<uint32_t>(n);
  if (left_ == 0) {
    state_ = State::kHeader;
    return true;
  }
  if (in->last && in->next == in->end && out->next < out->end) damaged("the stream is cut off");
  return false;
}

// Decodes one symbol at a time, near the ends of input and output. Returns false if it needs more
// of either.
bool Inflater::coded(BitReader* in, Output* out) {
  while (state_ == State::kCoded) {
    if (left_ > 0) {
      const size_t n =
          std::min(static_cast<size_t>(left_), static_cast<size_t>(out->end - out->next));
      for (size_t i = 0; i < n; ++i, ++out->next) *out->next = *(out->next - distance_);
      left_ -= static_cast<uint32_t>(n);
    }
    if (out->next == out->end) return false;
    if (in->end - in->next >= kFastInput && out->end - out->next >= kFastOutput) {
      in->give_back();  // so that next is where the bits that were used end
      const uint8_t* const from = in->next;
      const size_t span = chain_span(*in, *out);
      if (span > 0) coded_chains(span, in, out);
      if (state_ == State::kCoded && in->next == from) coded_fast(in, out);
      block_used_ += static_cast<size_t>(in->next - from);
      continue;
    }
    in->refill();
    if (in->count < kSymbolBits && !in->last) return false;
    uint32_t e = codes_.litlen()[low(in->bits, kLitlenBits)];
    const auto use = [&](uint32_t n) {
      if (in->count < n) damaged("the stream is cut off");
      in->bits >>= n;
      in->count -= n;
    };
    if (e & kSubtable && e & kUnusual) {
      use(kLitlenBits);
      e = codes_.litlen()[(e >> 16) + low(in->bits, e >> 8 & 15)];
    }
    if (e & kLiteral) {
      use(e & 0xff);
      *out->next++ = static_cast<uint8_t>(e >> 16);
      continue;
    }
    if (e & kUnusual) {
      if (e & kInvalid) damaged("an invalid code");
      use(e & 0xff);
      state_ = State::kHeader;
      return true;
    }
    const uint32_t length = value(e, in->bits);
    use(e & 0xff);
    e = codes_.dist()[low(in->bits, kDistBits)];
    if ((e & kUnusual) && (e & kSubtable)) {
      use(kDistBits);
      e = codes_.dist()[(e >> 16) + low(in->bits, e >> 8 & 15)];
    }
    if (e & kUnusual) damaged("an invalid distance");
    const uint32_t distance = value(e, in->bits);
    use(e & 0xff);
    if (distance > out->reach()) damaged(kBeyondBeginning);
    if (out->at() < watched() + distance) {
      mark(out->at() - distance, length, distance, out->next - distance);
    }
    left_ = length;
    distance_ = distance;
  }
  return true;
}

// Decodes symbols while input and output have room for the longest symbol, until the block ends.
TS_INLINE void Inflater::coded_fast_any(BitReader* input, Output* output) {
  const uint8_t* in = input->next;
  const uint8_t* const in_end = input->end - kFastInput;
  uint8_t* out = output->next;
  uint8_t* const out_end = output->end - kFastOutput;
  uint64_t bits = input->bits;
  uint32_t count = input->count;
  const uint32_t* const litlen = codes_.litlen();
  const uint32_t* const dist = codes_.dist();
  // Positions count from the oldest byte that a match may copy. Matches from before `barrier` are
  // noted, for an open checkpoint or an unknown window.
  const uint8_t* const oldest = output->begin - output->history;
  const int64_t origin =
      static_cast<int64_t>(output->offset) - static_cast<int64_t>(output->history);
  int64_t barrier = static_cast<int64_t>(watched()) - origin;

  // Only the low byte of `count` is meaningful here, and only the low six bits of an entry as the
  // number of bits to consume. So refilling and consuming take no masking instructions.
  const auto refill = [&]() __attribute__((always_inline)) {
    bits |= load64(in) << (count & 63);
    in += ~count >> 3 & 7;
    count |= 56;
  };
  const auto use = [&](uint32_t entry) __attribute__((always_inline)) {
    bits >>= entry & 63;
    count -= entry;
  };
  const char* error = nullptr;
  while (in <= in_end && out <= out_end) {
    refill();  // at least 56 bits: five literals of the root table
    uint32_t e = litlen[low(bits, kLitlenBits)];
    if (e & kLiteral) {
      use(e);
      *out++ = static_cast<uint8_t>(e >> 16);
      e = litlen[low(bits, kLitlenBits)];
      if (e & kLiteral) {
        use(e);
        *out++ = static_cast<uint8_t>(e >> 16);
        e = litlen[low(bits, kLitlenBits)];
        if (e & kLiteral) {
          use(e);
          *out++ = static_cast<uint8_t>(e >> 16);
          e = litlen[low(bits, kLitlenBits)];
          if (e & kLiteral) {
            use(e);
            *out++ = static_cast<uint8_t>(e >> 16);
            e = litlen[low(bits, kLitlenBits)];
            if (e & kLiteral) {
              use(e);
              *out++ = static_cast<uint8_t>(e >> 16);
              continue;
            }
          }
        }
      }
      refill();
    }
    if (e & kUnusual) {
      if (e & kSubtable) {
        use(kLitlenBits);
        e = litlen[(e >> 16) + low(bits, e >> 8 & 15)];
        if (e & kLiteral) {
          use(e);
          *out++ = static_cast<uint8_t>(e >> 16);
          continue;
        }
      }
      if (e & kUnusual) {
        if (e & kInvalid) {
          error = "an invalid code";
          break;
        }
        use(e);
        state_ = State::kHeader;
        break;
      }
    }
    // A length takes up to 20 bits and a distance up to 28.
    const uint32_t length = value(e, bits);
    use(e);
    e = dist[low(bits, kDistBits)];
    if (e & kUnusual) {
      if (e & kSubtable) {
        use(kDistBits);
        e = dist[(e >> 16) + low(bits, e >> 8 & 15)];
      }
      if (e & kUnusual) {
        error = "an invalid distance";
        break;
      }
    }
    const uint32_t distance = value(e, bits);
    use(e);
    const int64_t source = (out - oldest) - static_cast<int64_t>(distance);
    if (source < barrier) {
      if (source < 0) {
        error = kBeyondBeginning;
        break;
      }
      mark(static_cast<uint64_t>(source + origin), length, distance, out - distance);
      barrier = static_cast<int64_t>(watched()) - origin;
    } else if (source < 0) {
      error = kBeyondBeginning;
      break;
    }
    copy_match(out, length, distance);
    out += length;
  }
  if (error != nullptr) damaged(error);
  input->next = in;
  input->bits = bits;
  input->count = count & 0xff;
  input->give_back();
  output->next = out;
}

void Inflater::coded_fast_baseline(BitReader* input, Output* output) {
  coded_fast_any(input, output);
}

#if defined(__x86_64__)
// A shift by a variable is three instructions without BMI2, and it is on the critical path from
// each symbol to the next.
__attribute__((target("bmi,bmi2"))) void Inflater::coded_fast_bmi2(BitReader* input,
                                                                   Output* output) {
  coded_fast_any(input, output);
}
#endif

void Inflater::coded_fast(BitReader* input, Output* output) {
#if defined(__x86_64__)
  if (instructions_ == Instructions::kBmi2) return coded_fast_bmi2(input, output);
#endif
  coded_fast_baseline(input, output);
}

// Marks the bytes [source, source + length) of the output as copied, in all open checkpoints, and
// saves them. Records whether the copy depends on an unknown window.
void Inflater::mark(uint64_t source, uint32_t length, uint32_t distance, const uint8_t* bytes) {
  unknown_.match(source, length, distance);
  for (const auto& c : open_) {
    if (source >= c->output || c->output - source > kWindow) continue;
    const uint64_t n = std::min<uint64_t>(length, c->output - source);
    const uint64_t at = source + kWindow - c->output;
    set_bits(c->used.data(), at, n);
    // Nearly all matches are short, and a copy of a constant size takes one instruction.
    constexpr uint64_t kShort = 16;
    const uint64_t most = kWindow - at;
    if (n + kGap <= kShort && kShort <= most) {
      std::memcpy(c->window.data() + at, bytes, kShort);
    } else {
      std::memcpy(c->window.data() + at, bytes, std::min(n + kGap, most));
    }
  }
}

void Inflater::finish_checkpoints(uint64_t output, bool all) {
  while (!open_.empty() && (all || output - open_.front()->output >= kWindow)) {
    finished_.push_back(std::move(open_.front()));
    open_.pop_front();
  }
  if (open_.empty()) open_end_ = 0;
}

const Inflater::Checkpoint* Inflater::next_checkpoint() {
  if (taken_ != nullptr) spare_.push_back(std::move(taken_));
  if (finished_.empty()) return nullptr;
  taken_ = std::move(finished_.front());
  finished_.pop_front();
  return taken_.get();
}

}  // namespace ts::image

struct ts_inflater {
  explicit ts_inflater(uint64_t spacing) : inflater(spacing) {}

  ts::image::Inflater inflater;
};

ts_error* ts_inflater_new(size_t spacing, ts_inflater** inflater) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    *inflater = std::make_unique<ts_inflater>(spacing).release();
  });
}

void ts_inflater_free(ts_inflater* inflater) { const std::unique_ptr<ts_inflater> owned(inflater); }

ts_error* ts_inflater_reset(ts_inflater* inflater, int32_t skip_bits, size_t history) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(skip_bits >= 0 && skip_bits <= 7, "skip_bits is not in 0 to 7");
    inflater->inflater.reset(static_cast<uint32_t>(skip_bits), history);
  });
}

ts_error* ts_inflater_run(ts_inflater* inflater, const uint8_t* input, size_t bytes, bool last,
                          uint8_t* buffer, size_t begin, size_t end,
                          ts_inflate_progress* progress) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(input != nullptr || bytes == 0, "input is NULL");
    ts::require(buffer != nullptr || end == 0, "buffer is NULL");
    ts::require(progress != nullptr, "progress is NULL");
    const auto p = inflater->inflater.run(input, bytes, last, buffer, begin, end);
    *progress = ts_inflate_progress{p.consumed, p.produced, p.done};
  });
}

ts_error* ts_inflater_get_checkpoint(ts_inflater* inflater, ts_inflate_checkpoint* checkpoint) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(checkpoint != nullptr, "checkpoint is NULL");
    const auto* c = inflater->inflater.next_checkpoint();
    *checkpoint = c == nullptr
                      ? ts_inflate_checkpoint{}
                      : ts_inflate_checkpoint{c->bit, c->output, c->window.data(), c->used.data()};
  });
}

ts_error* ts_inflater_follow(ts_inflater* inflater, int32_t skip_bits, size_t history) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(skip_bits >= 0 && skip_bits <= 7, "skip_bits is not in 0 to 7");
    inflater->inflater.follow(static_cast<uint32_t>(skip_bits), history);
  });
}

ts_error* ts_inflater_settle(ts_inflater* inflater, const uint8_t* buffer, size_t end,
                             size_t spacing, uint64_t last) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(buffer != nullptr || end == 0, "buffer is NULL");
    inflater->inflater.settle(buffer, end, spacing, last);
  });
}

ts_error* ts_inflater_finish(ts_inflater* inflater, const uint8_t* window,
                             const ts_inflate_copy* copies, size_t count) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(window != nullptr, "window is NULL");
    ts::require(copies != nullptr || count == 0, "copies is NULL");
    inflater->inflater.finish(window, copies, count);
  });
}

ts_error* ts_inflater_stop_at(ts_inflater* inflater, uint64_t bit) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    inflater->inflater.stop_at(bit);
  });
}

ts_error* ts_inflater_get_state(const ts_inflater* inflater, ts_inflate_state* state) {
  return ts::guard(__func__, [&] {
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(state != nullptr, "state is NULL");
    *state = inflater->inflater.state();
  });
}

ts_error* ts_inflater_find(const uint8_t* input, size_t bytes, uint64_t from, uint64_t to,
                           ts_inflate_found* found) {
  return ts::guard(__func__, [&] {
    ts::require(input != nullptr || bytes == 0, "input is NULL");
    ts::require(found != nullptr, "found is NULL");
    *found = ts::image::find_start(input, bytes, from, to);
  });
}
