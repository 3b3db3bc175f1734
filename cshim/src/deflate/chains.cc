#include <algorithm>
#include <array>
#include <cstring>

#include "deflate/guess.h"
#include "deflate/inflate.h"

namespace ts::image {
namespace {

enum class Kind { kLiteral, kMatch, kStop };

struct Symbol {
  Kind kind;
  uint32_t value;  // the literal, or the length of the match
  uint32_t distance;
};

// Consumes the next symbol. A chain stays before a symbol that ends the block or is invalid.
Symbol next_symbol(const Codes& codes, Chain* chain) {
  Chain c = *chain;
  c.refill();
  uint32_t e = codes.litlen()[low(c.bits, kLitlenBits)];
  if (!(e & kLiteral) && (e & kUnusual) && (e & kSubtable)) {
    c.use(kLitlenBits);
    e = codes.litlen()[(e >> 16) + low(c.bits, e >> 8 & 15)];
  }
  if (e & kLiteral) {
    c.use(e);
    *chain = c;
    return {Kind::kLiteral, e >> 16 & 0xff, 0};
  }
  if (e & kUnusual) return {Kind::kStop, 0, 0};
  const uint32_t length = value(e, c.bits);
  c.use(e);
  e = codes.dist()[low(c.bits, kDistBits)];
  if ((e & kUnusual) && (e & kSubtable)) {
    c.use(kDistBits);
    e = codes.dist()[(e >> 16) + low(c.bits, e >> 8 & 15)];
  }
  if (e & kUnusual) return {Kind::kStop, 0, 0};
  const uint32_t distance = value(e, c.bits);
  c.use(e);
  *chain = c;
  return {Kind::kMatch, length, distance};
}

// Decodes the next symbol of a guess. Returns false if the chain ends before it.
bool guess_symbol(const Codes& codes, Chain* chain, Guess* guess) {
  if (guess->match_count == Guess::kMatches) return false;
  const Symbol s = next_symbol(codes, chain);
  if (s.kind == Kind::kLiteral) *chain->out++ = static_cast<uint8_t>(s.value);
  if (s.kind == Kind::kMatch) {
    guess->matches[guess->match_count++] = {
        static_cast<uint16_t>(chain->out - guess->literals.data()), static_cast<uint16_t>(s.value),
        s.distance};
  }
  return s.kind != Kind::kStop;
}

// Adds the chain's place to the guess's trail.
TS_INLINE void record(const Chain& chain, const uint8_t* base, Guess* guess) {
  guess->trail[guess->places++] = {chain.position(base),
                                   static_cast<uint16_t>(chain.out - guess->literals.data()),
                                   static_cast<uint16_t>(guess->match_count)};
}

// Returns the decoder at the reader's position, which has fewer than 8 bits and is not at the
// beginning of the input within a byte.
Chain chain_at(const BitReader& in, uint8_t* out) {
  if (in.count == 0) return {in.next, load64(in.next) | Chain::kMarker, out};
  const uint8_t* const from = in.next - 1;
  return {from, (load64(from) | Chain::kMarker) >> (8 - in.count), out};
}

void put_back(const Chain& chain, BitReader* in) {
  const uint32_t n = chain.consumed();
  in->next = chain.in + (n + 7) / 8;
  in->count = (8 - n % 8) % 8;
  in->bits = in->count == 0 ? 0 : in->next[-1] >> (n % 8);
}

}  // namespace

// Decodes with the first N chains until the first one is at the first guess's start. Returns the
// number of the chain that ends before its next symbol, or N. A step decodes five literals of each
// chain or, where one has another symbol, the literals before that symbol, and the symbol.
template <size_t N>
TS_INLINE size_t Inflater::step(const Bounds& bounds, Chain* chains, Output* output) {
  const uint32_t* const litlen = codes_.litlen();
  // No chain's address is taken, so that they stay in registers.
  Chain a = chains[0];
  Chain b = chains[1];
  Chain c = chains[N - 1];
  Guess* const guesses = guesses_.data();
  const uint8_t* const a_end = guesses[0].start;
  const auto room = [&]() __attribute__((always_inline)) {
    return a.in < a_end && a.out <= bounds.out_end && b.in <= bounds.in_end &&
           (N == 2 || c.in <= bounds.in_end);
  };
  uint32_t ea = 0;
  uint32_t eb = 0;
  uint32_t ec = 0;
  const auto literals = [&](size_t i) __attribute__((always_inline)) {
    ea = litlen[low(a.bits, kLitlenBits)];
    eb = litlen[low(b.bits, kLitlenBits)];
    if constexpr (N > 2) ec = litlen[low(c.bits, kLitlenBits)];
    static_assert(kLiteral == 1u << 31, "the sign tells literals");
    if (static_cast<int32_t>(ea & eb & (N > 2 ? ec : ea)) >= 0) return false;
    a.use(ea);
    b.use(eb);
    if constexpr (N > 2) c.use(ec);
    a.out[i] = static_cast<uint8_t>(ea >> 16);
    b.out[i] = static_cast<uint8_t>(eb >> 16);
    if constexpr (N > 2) c.out[i] = static_cast<uint8_t>(ec >> 16);
    return true;
  };
  const auto other = [&](Chain * chain, auto symbol) __attribute__((always_inline)) {
    Chain copy = *chain;
    const bool more = symbol(&copy);
    *chain = copy;
    return more;
  };
  size_t stopped = N;
  while (stopped == N && steps_ < Guess::kSteps && room()) {
    a.refill();
    b.refill();
    if constexpr (N > 2) c.refill();
    if (steps_++ < Guess::kTrail) {
      record(b, bounds.base, &guesses[0]);
      if constexpr (N > 2) record(c, bounds.base, &guesses[1]);
    }
    size_t i = 0;
    if (literals(0) && (i = 1, literals(1)) && (i = 2, literals(2)) && (i = 3, literals(3)) &&
        (i = 4, literals(4))) {
      i = 5;
    }
    a.out += i;
    b.out += i;
    if constexpr (N > 2) c.out += i;
    if (i == 5) continue;
    // A chain whose next symbol is a literal decodes it in the next step.
    if (!(ea & kLiteral)) {
      if (!other(&a, [&](Chain* chain) { return first_symbol(chain, output); })) stopped = 0;
    }
    if (!(eb & kLiteral) && stopped == N) {
      if (!other(&b, [&](Chain* chain) { return guess_symbol(codes_, chain, &guesses[0]); })) {
        stopped = 1;
      }
    }
    if constexpr (N > 2) {
      if (!(ec & kLiteral) && stopped == N) {
        if (!other(&c, [&](Chain* chain) { return guess_symbol(codes_, chain, &guesses[1]); })) {
          stopped = 2;
        }
      }
    }
  }
  chains[0] = a;
  chains[1] = b;
  if constexpr (N > 2) chains[2] = c;
  return stopped;
}

// Decodes the next symbol of the chain that is right. Returns false if the chain ends before it.
bool Inflater::first_symbol(Chain* chain, Output* output) {
  const Chain before = *chain;
  const Symbol s = next_symbol(codes_, chain);
  if (s.kind == Kind::kLiteral) *chain->out++ = static_cast<uint8_t>(s.value);
  if (s.kind == Kind::kMatch) {
    output->next = chain->out;
    if (!copy(s.value, s.distance, output)) {
      *chain = before;
      return false;
    }
    chain->out = output->next;
  }
  return s.kind != Kind::kStop;
}

// Copies a match to the output. Returns false if it begins before the output.
bool Inflater::copy(uint32_t length, uint32_t distance, Output* output) {
  if (distance > output->reach()) return false;
  if (output->at() < watched() + distance) {
    mark(output->at() - distance, length, distance, output->next - distance);
  }
  copy_match(output->next, length, distance);
  output->next += length;
  return true;
}

// Decodes until the chain is at a place of the guess's trail. Returns the place, or NULL.
const Guess::Place* Inflater::meet(const Bounds& bounds, const Guess& guess, Chain* chain,
                                   Output* output) {
  const Guess::Place* place = guess.trail.data();
  const Guess::Place* const end = place + guess.places;
  while (chain->in <= bounds.in_end && chain->out <= bounds.out_end) {
    const uint32_t at = chain->position(bounds.base);
    while (place < end && place->bit < at) ++place;
    if (place == end) return nullptr;
    if (place->bit == at) return place;
    if (!first_symbol(chain, output)) return nullptr;
  }
  return nullptr;
}

// Appends the guess's output after a place. Returns false if there is no room.
bool Inflater::append(const Guess& guess, const Guess::Place& from, const uint8_t* literals_end,
                      const uint8_t* out_end, Output* output) {
  const uint8_t* literals = guess.literals.data() + from.literals;
  auto total = static_cast<size_t>(literals_end - literals);
  for (size_t i = from.matches; i < guess.match_count; ++i) total += guess.matches[i].length;
  if (out_end - output->next < static_cast<ptrdiff_t>(total)) return false;
  const auto literals_until = [&](const uint8_t* end) {
    const auto n = static_cast<size_t>(end - literals);
    std::memcpy(output->next, literals, n);
    output->next += n;
    literals = end;
  };
  for (size_t i = from.matches; i < guess.match_count; ++i) {
    const Guess::Match& m = guess.matches[i];
    literals_until(guess.literals.data() + m.literals);
    if (!copy(m.length, m.distance, output)) damaged(kBeyondBeginning);
  }
  literals_until(literals_end);
  guessed_ += total;
  return true;
}

// Decodes as coded_fast, up to an address of the input at least.
void Inflater::coded_until(const uint8_t* until, BitReader* input, Output* output) {
  const uint8_t* const end = input->end;
  input->end = std::min(end, until + kFastInput);
  if (input->end - input->next >= kFastInput) coded_fast(input, output);
  input->end = end;
}

TS_INLINE void Inflater::coded_chains_any(size_t span, BitReader* input, Output* output) {
  input->give_back();
  // A chain reads the byte again that has its first bits. It may be from the previous input.
  if (input->next == input->begin && input->count > 0) {
    coded_until(input->next + 8, input, output);
    return;
  }
  guesses_.resize(kChains - 1);
  std::array<Chain, kChains> chains;
  chains[0] = chain_at(*input, output->next);
  for (size_t n = 1; n < kChains; ++n) {
    Guess& g = guesses_[n - 1];
    g.start = input->next + n * span;
    g.match_count = g.places = 0;
    chains[n] = {g.start, load64(g.start) | Chain::kMarker, g.literals.data()};
  }
  const Bounds bounds = {chains[0].in, input->end - kFastInput, output->end - kFastOutput};
  steps_ = 0;
  size_t stopped = step<kChains>(bounds, chains.data(), output);
  if (stopped == 2) stopped = step<2>(bounds, chains.data(), output);
  output->next = chains[0].out;
  put_back(chains[0], input);
  if (stopped == 0) return;
  for (size_t n = 1; n < kChains; ++n) {
    const Guess& guess = guesses_[n - 1];
    coded_until(guess.start, input, output);
    if (state_ != State::kCoded) return;
    Chain chain = chain_at(*input, output->next);
    const Guess::Place* const place = meet(bounds, guess, &chain, output);
    output->next = chain.out;
    if (place == nullptr || !append(guess, *place, chains[n].out, bounds.out_end, output)) {
      ++misses_;
      put_back(chain, input);
      return;
    }
    put_back(chains[n], input);
  }
}

void Inflater::coded_chains_baseline(size_t span, BitReader* input, Output* output) {
  coded_chains_any(span, input, output);
}

#if defined(__x86_64__)
__attribute__((target("bmi,bmi2,lzcnt"))) void Inflater::coded_chains_bmi2(size_t span,
                                                                           BitReader* input,
                                                                           Output* output) {
  coded_chains_any(span, input, output);
}
#endif

// Decodes from several places, `span` bytes of input apart. Decodes nothing if the next symbol ends
// the block or is invalid.
void Inflater::coded_chains(size_t span, BitReader* input, Output* output) {
#if defined(__x86_64__)
  if (instructions_ == Instructions::kBmi2) return coded_chains_bmi2(span, input, output);
#endif
  coded_chains_baseline(span, input, output);
}

// Returns the number of bytes between the chains for the rest of a block, or 0 for no chains.
size_t Inflater::chain_span(const BitReader& in, const Output& out) const {
  constexpr size_t kMin = 384;
  constexpr size_t kUsual = 2048;
  constexpr size_t kMax = 3072;
  constexpr uint32_t kMaxMisses = 4;
  if (!codes_.mostly_literals() || misses_ == kMaxMisses) return 0;
  // Most compressors end a block after a fixed number of symbols.
  const size_t rest = block_bytes_ > block_used_ ? block_bytes_ - block_used_ : kChains * kUsual;
  const size_t rounds = 1 + rest / (kChains * kMax);
  const auto input = static_cast<size_t>(in.end - in.next);
  const auto room = static_cast<size_t>(out.end - out.next);
  const size_t span =
      std::min({rest / (kChains * rounds), input / (kChains + 1), room / (kChains + 1)});
  return span < kMin ? 0 : span;
}

}  // namespace ts::image
