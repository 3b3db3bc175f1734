#include "image/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
// GCC 12 warns about its own _mm512_undefined_epi32.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#define TS_AVX2 __attribute__((target("avx2")))
#define TS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#endif

namespace ts::image {
namespace {

constexpr size_t kChannels = 3;
constexpr size_t kStoreSlack = 4;  // bytes that the columns pass may write after a row's last pixel

// ---- scalar kernels, which define the result -------------------------------------------------

uint8_t finish(int32_t sum, int32_t precision) {
  return static_cast<uint8_t>(std::clamp(sum >> precision, 0, 255));
}

void columns_scalar(const uint8_t* in, uint8_t* out, const Axis& axis) {
  const int32_t half = 1 << (axis.precision() - 1);
  for (int32_t i = 0; i < axis.outputs(); ++i) {
    const uint8_t* pixel = in + static_cast<size_t>(axis.first(i)) * kChannels;
    const int16_t* weights = axis.weights(i);
    int32_t sum[kChannels] = {half, half, half};
    for (int32_t k = 0; k < axis.taps(); ++k, pixel += kChannels) {
      for (size_t c = 0; c < kChannels; ++c) sum[c] += weights[k] * pixel[c];
    }
    for (size_t c = 0; c < kChannels; ++c) *out++ = finish(sum[c], axis.precision());
  }
}

void rows_scalar(const uint8_t* const* in, const int16_t* weights, int32_t taps, int32_t precision,
                 size_t begin, size_t end, uint8_t* out) {
  const int32_t half = 1 << (precision - 1);
  for (size_t i = begin; i < end; ++i) {
    int32_t sum = half;
    for (int32_t k = 0; k < taps; ++k) sum += weights[k] * in[k][i];
    out[i] = finish(sum, precision);
  }
}

// ---- AVX2 kernels ----------------------------------------------------------------------------

#if defined(__x86_64__)

// Returns two neighbouring weights in every lane, to multiply-add two neighbouring samples.
TS_AVX2 inline __m256i weight_pair(const int16_t* weights) {
  int32_t pair;
  std::memcpy(&pair, weights, sizeof pair);
  return _mm256_set1_epi32(pair);
}

TS_AVX2 inline __m256i load_two_rows(const uint8_t* row0, const uint8_t* row1) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row0))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(row1)), 1);
}

TS_AVX2 inline void store_pixel(uint8_t* out, int32_t rgbx) {
  std::memcpy(out, &rgbx, sizeof rgbx);
}

// Resizes four rows at once, two in each register, since they share the weights. kTaps is the
// number of taps; 0 reads it from the axis. Each pixel is stored as four bytes, and the next pixel
// overwrites the fourth.
template <int kTaps>
TS_AVX2 void columns_avx2(const uint8_t* const in[4], uint8_t* const out[4], const Axis& axis) {
  // These shuffles turn four RGB pixels in a lane into the 16-bit pairs (r0 r1) (g0 g1) (b0 b1),
  // and into the same pairs of pixels 2 and 3.
  const __m256i pixels01 = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
  const __m256i pixels23 = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
  const __m256i half = _mm256_set1_epi32(1 << (axis.precision() - 1));
  const __m128i shift = _mm_cvtsi32_si128(axis.precision());
  const int32_t taps = kTaps == 0 ? axis.taps() : kTaps;
  const int32_t outputs = axis.outputs();
  for (int32_t i = 0; i < outputs; ++i) {
    size_t offset = static_cast<size_t>(axis.first(i)) * kChannels;
    const int16_t* weights = axis.weights(i);
    __m256i sum01 = half;
    __m256i sum23 = half;
    int32_t k = 0;
    for (; k + 4 <= taps; k += 4, offset += 4 * kChannels) {
      const __m256i weights01 = weight_pair(weights + k);
      const __m256i weights23 = weight_pair(weights + k + 2);
      const __m256i rows01 = load_two_rows(in[0] + offset, in[1] + offset);
      const __m256i rows23 = load_two_rows(in[2] + offset, in[3] + offset);
      sum01 = _mm256_add_epi32(sum01,
                               _mm256_madd_epi16(_mm256_shuffle_epi8(rows01, pixels01), weights01));
      sum23 = _mm256_add_epi32(sum23,
                               _mm256_madd_epi16(_mm256_shuffle_epi8(rows23, pixels01), weights01));
      sum01 = _mm256_add_epi32(sum01,
                               _mm256_madd_epi16(_mm256_shuffle_epi8(rows01, pixels23), weights23));
      sum23 = _mm256_add_epi32(sum23,
                               _mm256_madd_epi16(_mm256_shuffle_epi8(rows23, pixels23), weights23));
    }
    if (k < taps) {
      const __m256i weights01 = weight_pair(weights + k);
      const __m256i rows01 = load_two_rows(in[0] + offset, in[1] + offset);
      const __m256i rows23 = load_two_rows(in[2] + offset, in[3] + offset);
      sum01 = _mm256_add_epi32(sum01,
                               _mm256_madd_epi16(_mm256_shuffle_epi8(rows01, pixels01), weights01));
      sum23 = _mm256_add_epi32(sum23,
                               _mm256_madd_epi16(_mm256_shuffle_epi8(rows23, pixels01), weights01));
    }
    const __m256i words =
        _mm256_packs_epi32(_mm256_sra_epi32(sum01, shift), _mm256_sra_epi32(sum23, shift));
    const __m256i bytes = _mm256_packus_epi16(words, words);  // lane 0: rows 0, 2; lane 1: 1, 3
    const __m128i rows02 = _mm256_castsi256_si128(bytes);
    const __m128i rows13 = _mm256_extracti128_si256(bytes, 1);
    const size_t at = static_cast<size_t>(i) * kChannels;
    store_pixel(out[0] + at, _mm_cvtsi128_si32(rows02));
    store_pixel(out[1] + at, _mm_cvtsi128_si32(rows13));
    store_pixel(out[2] + at, _mm_extract_epi32(rows02, 1));
    store_pixel(out[3] + at, _mm_extract_epi32(rows13, 1));
  }
}

TS_AVX2 inline __m256i load32(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Processes 32 bytes at a time. The last step of a row overlaps the previous one.
TS_AVX2 void rows_avx2(const uint8_t* const* in, const int16_t* weights, int32_t taps,
                       int32_t precision, size_t size, uint8_t* out) {
  if (size < 32) {
    rows_scalar(in, weights, taps, precision, 0, size, out);
    return;
  }
  const __m256i zero = _mm256_setzero_si256();
  const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
  const __m128i shift = _mm_cvtsi32_si128(precision);
  for (size_t i = 0;; i += 32) {
    i = std::min(i, size - 32);
    __m256i sum0 = half;
    __m256i sum1 = half;
    __m256i sum2 = half;
    __m256i sum3 = half;
    for (int32_t k = 0; k < taps; k += 2) {
      const __m256i pair = weight_pair(weights + k);
      const __m256i row0 = load32(in[k] + i);
      const __m256i row1 = load32(in[k + 1] + i);
      const __m256i low = _mm256_unpacklo_epi8(row0, row1);
      const __m256i high = _mm256_unpackhi_epi8(row0, row1);
      sum0 = _mm256_add_epi32(sum0, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), pair));
      sum1 = _mm256_add_epi32(sum1, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), pair));
      sum2 = _mm256_add_epi32(sum2, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), pair));
      sum3 = _mm256_add_epi32(sum3, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), pair));
    }
    const __m256i words0 =
        _mm256_packs_epi32(_mm256_sra_epi32(sum0, shift), _mm256_sra_epi32(sum1, shift));
    const __m256i words1 =
        _mm256_packs_epi32(_mm256_sra_epi32(sum2, shift), _mm256_sra_epi32(sum3, shift));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_packus_epi16(words0, words1));
    if (i + 32 >= size) break;
  }
}

// ---- AVX-512 kernels, with the multiply-add that adds to a sum

TS_AVX512 inline __m512i weight_pair_wide(const int16_t* weights) {
  int32_t pair;
  std::memcpy(&pair, weights, sizeof pair);
  return _mm512_set1_epi32(pair);
}

TS_AVX512 inline __m512i load_four_rows(const uint8_t* const in[4], size_t offset) {
  const auto load = [&](int row) TS_AVX512 {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in[row] + offset));
  };
  const __m256i rows01 = _mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(1), 1);
  const __m256i rows23 = _mm256_inserti128_si256(_mm256_castsi128_si256(load(2)), load(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(rows01), rows23, 1);
}

// Does the work of columns_avx2 with all four rows in one register. Stores four outputs at a time
// as 16 bytes of each row; the next outputs, if any, overwrite the last four bytes.
template <int kTaps>
TS_AVX512 void columns_avx512(const uint8_t* const in[4], uint8_t* const out[4], const Axis& axis) {
  const __m512i pixels01 = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
  const __m512i pixels23 = _mm512_broadcast_i32x4(
      _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
  const __m512i half = _mm512_set1_epi32(1 << (axis.precision() - 1));
  const __m128i shift = _mm_cvtsi32_si128(axis.precision());
  const int32_t taps = kTaps == 0 ? axis.taps() : kTaps;
  const auto output = [&](int32_t i) TS_AVX512 {
    size_t offset = static_cast<size_t>(axis.first(i)) * kChannels;
    const int16_t* weights = axis.weights(i);
    __m512i sum = half;
    int32_t k = 0;
    for (; k + 4 <= taps; k += 4, offset += 4 * kChannels) {
      const __m512i rows = load_four_rows(in, offset);
      sum = _mm512_dpwssd_epi32(sum, _mm512_shuffle_epi8(rows, pixels01),
                                weight_pair_wide(weights + k));
      sum = _mm512_dpwssd_epi32(sum, _mm512_shuffle_epi8(rows, pixels23),
                                weight_pair_wide(weights + k + 2));
    }
    if (k < taps) {
      sum = _mm512_dpwssd_epi32(sum, _mm512_shuffle_epi8(load_four_rows(in, offset), pixels01),
                                weight_pair_wide(weights + k));
    }
    return _mm512_sra_epi32(sum, shift);
  };
  const __m512i without_fourths =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
  const int32_t outputs = axis.outputs();
  int32_t i = 0;
  for (; i + 4 <= outputs; i += 4) {
    const __m512i words01 = _mm512_packs_epi32(output(i), output(i + 1));
    const __m512i words23 = _mm512_packs_epi32(output(i + 2), output(i + 3));
    const __m512i bytes =
        _mm512_shuffle_epi8(_mm512_packus_epi16(words01, words23), without_fourths);
    const size_t at = static_cast<size_t>(i) * kChannels;
    const auto store = [&](int row, __m128i pixels) TS_AVX512 {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[row] + at), pixels);
    };
    store(0, _mm512_castsi512_si128(bytes));
    store(1, _mm512_extracti32x4_epi32(bytes, 1));
    store(2, _mm512_extracti32x4_epi32(bytes, 2));
    store(3, _mm512_extracti32x4_epi32(bytes, 3));
  }
  for (; i < outputs; ++i) {
    const __m512i clipped = _mm512_max_epi32(output(i), _mm512_setzero_si512());
    const __m128i bytes = _mm512_cvtusepi32_epi8(clipped);  // four of each row
    const size_t at = static_cast<size_t>(i) * kChannels;
    store_pixel(out[0] + at, _mm_cvtsi128_si32(bytes));
    store_pixel(out[1] + at, _mm_extract_epi32(bytes, 1));
    store_pixel(out[2] + at, _mm_extract_epi32(bytes, 2));
    store_pixel(out[3] + at, _mm_extract_epi32(bytes, 3));
  }
}

// Does the work of rows_avx2, 64 bytes at a time.
TS_AVX512 void rows_avx512(const uint8_t* const* in, const int16_t* weights, int32_t taps,
                           int32_t precision, size_t size, uint8_t* out) {
  if (size < 64) {
    rows_avx2(in, weights, taps, precision, size, out);
    return;
  }
  const __m512i zero = _mm512_setzero_si512();
  const __m512i half = _mm512_set1_epi32(1 << (precision - 1));
  const __m128i shift = _mm_cvtsi32_si128(precision);
  for (size_t i = 0;; i += 64) {
    i = std::min(i, size - 64);
    __m512i sum0 = half;
    __m512i sum1 = half;
    __m512i sum2 = half;
    __m512i sum3 = half;
    for (int32_t k = 0; k < taps; k += 2) {
      const __m512i pair = weight_pair_wide(weights + k);
      const __m512i row0 = _mm512_loadu_si512(in[k] + i);
      const __m512i row1 = _mm512_loadu_si512(in[k + 1] + i);
      const __m512i low = _mm512_unpacklo_epi8(row0, row1);
      const __m512i high = _mm512_unpackhi_epi8(row0, row1);
      sum0 = _mm512_dpwssd_epi32(sum0, _mm512_unpacklo_epi8(low, zero), pair);
      sum1 = _mm512_dpwssd_epi32(sum1, _mm512_unpackhi_epi8(low, zero), pair);
      sum2 = _mm512_dpwssd_epi32(sum2, _mm512_unpacklo_epi8(high, zero), pair);
      sum3 = _mm512_dpwssd_epi32(sum3, _mm512_unpackhi_epi8(high, zero), pair);
    }
    const __m512i words0 =
        _mm512_packs_epi32(_mm512_sra_epi32(sum0, shift), _mm512_sra_epi32(sum1, shift));
    const __m512i words1 =
        _mm512_packs_epi32(_mm512_sra_epi32(sum2, shift), _mm512_sra_epi32(sum3, shift));
    _mm512_storeu_si512(out + i, _mm512_packus_epi16(words0, words1));
    if (i + 64 >= size) break;
  }
}

#endif

void mirror(const uint8_t* in, uint8_t* out, int32_t pixels) {
  const uint8_t* from = in + static_cast<size_t>(pixels) * kChannels;
  for (int32_t i = 0; i < pixels; ++i, out += kChannels) {
    from -= kChannels;
    for (size_t c = 0; c < kChannels; ++c) out[c] = from[c];
  }
}

}  // namespace

Kernel best_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni")) {
    return Kernel::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return Kernel::kAvx2;
#endif
  return Kernel::kScalar;
}

namespace {

// The filters of LibTorch's antialiased kernels at a non-negative distance from their centre. The
// bicubic filter has Pillow's constant.
double bilinear(double x) { return x < 1.0 ? 1.0 - x : 0.0; }

double bicubic(double x) {
  constexpr double a = -0.5;
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a;
  return 0.0;
}

// Returns the sample of output i in LibTorch's "nearest", in its float32 arithmetic.
int32_t nearest(int32_t i, int32_t in, int32_t out) {
  if (out == 2 * int64_t{in}) return i / 2;
  const float scale = static_cast<float>(in) / static_cast<float>(out);
  return std::min(static_cast<int32_t>(static_cast<float>(i) * scale), in - 1);
}

}  // namespace

void Axis::plan(Span in, int32_t out, int32_t begin, int32_t size, bool reversed, bool mirrored,
                int32_t interpolation) {
  outputs_ = size;
  identity_ = in.count == out && in.begin == 0.0 && in.end == in.count;
  if (identity_) {
    source_begin_ = mirrored ? in.count - begin - size : begin;
    source_end_ = source_begin_ + size;
    return;
  }
  const auto slot_of = [&](int32_t i) {
    return static_cast<size_t>(reversed ? begin + size - 1 - i : i - begin);
  };
  first_.resize(static_cast<size_t>(size));
  size_.resize(static_cast<size_t>(size));
  if (interpolation == TS_INTERPOLATION_NEAREST) {
    for (int32_t i = begin; i < begin + size; ++i) {
      first_[slot_of(i)] = nearest(i, in.count, out);
      size_[slot_of(i)] = 1;
    }
    exact_.assign(static_cast<size_t>(size), 1.0);
    round(1, 1.0);
    if (mirrored) mirror(in.count);
    return;
  }

  // Computes the weights like LibTorch, operation by operation, because its rounding is part of the
  // result. The largest weight of all outputs decides the precision, so the weights of outputs
  // outside the window are computed too. A span of whole samples starts at 0, which changes no bit;
  // other spans are weighted like the box of Pillow's resize.
  if (mirrored) in = {in.count, in.count - in.end, in.count - in.begin};
  const bool cubic = interpolation == TS_INTERPOLATION_BICUBIC;
  const double reach = cubic ? 2.0 : 1.0;
  const double scale = (in.end - in.begin) / out;
  const double support = scale >= 1.0 ? reach * scale : reach;
  const double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
  const int64_t longest = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  const size_t pitch = static_cast<size_t>(std::min<int64_t>(longest, in.count));
  exact_.resize((static_cast<size_t>(size) + 1) * pitch);
  double largest = 0.0;
  for (int32_t i = 0; i < out; ++i) {
    const bool wanted = i >= begin && i < begin + size;
    const size_t slot = wanted ? slot_of(i) : static_cast<size_t>(size);
    double* weights = exact_.data() + slot * pitch;
    const double center = in.begin + scale * (i + 0.5);
    const int64_t from = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t to = std::min<int64_t>(static_cast<int64_t>(center + support + 0.5), in.count);
    const int64_t count = std::clamp<int64_t>(to - from, 0, longest);
    double total = 0.0;
    for (int64_t j = 0; j < count; ++j) {
      const double distance = std::fabs((static_cast<double>(j + from) - center + 0.5) * inverse);
      weights[j] = cubic ? bicubic(distance) : bilinear(distance);
      total += weights[j];
    }
    if (total != 0.0) {
      for (int64_t j = 0; j < count; ++j) {
        weights[j] /= total;
        largest = std::max(largest, weights[j]);
      }
    }
    if (wanted) {
      first_[slot] = static_cast<int32_t>(from);
      size_[slot] = static_cast<int32_t>(count);
    }
  }
  round(pitch, largest);
  if (mirrored) mirror(in.count);
}

void Axis::round(size_t pitch, double largest) {
  for (precision_ = 0; precision_ < 22; ++precision_) {
    if (static_cast<int32_t>(0.5 + largest * (1 << (precision_ + 1))) >= 1 << 15) break;
  }

  source_begin_ = first_[0];
  source_end_ = first_[0] + size_[0];
  taps_ = 0;
  for (size_t i = 0; i < first_.size(); ++i) {
    source_begin_ = std::min(source_begin_, first_[i]);
    source_end_ = std::max(source_end_, first_[i] + size_[i]);
    taps_ = std::max(taps_, size_[i]);
  }
  taps_ += taps_ & 1;
  weights_.assign(first_.size() * static_cast<size_t>(taps_), 0);
  const int32_t available = source_end_ - source_begin_;
  for (size_t i = 0; i < first_.size(); ++i) {
    // An output with fewer taps than the others starts earlier, so that it does not read past the
    // end.
    int32_t first = first_[i] - source_begin_;
    const int32_t shift = first - std::max(0, std::min(first, available - taps_));
    first_[i] = first - shift;
    int16_t* weights = weights_.data() + i * static_cast<size_t>(taps_) + shift;
    for (int32_t j = 0; j < size_[i]; ++j) {
      const double weight = exact_[i * pitch + static_cast<size_t>(j)] * (1 << precision_);
      weights[j] =
          static_cast<int16_t>(static_cast<int32_t>(weight < 0.0 ? weight - 0.5 : weight + 0.5));
    }
  }
}

// Changes only the positions: each output keeps its samples and their weights.
void Axis::mirror(int32_t count) {
  const int32_t available = source_end_ - source_begin_;
  for (size_t i = 0; i < first_.size(); ++i) {
    int16_t* weights = weights_.data() + i * static_cast<size_t>(taps_);
    std::reverse(weights, weights + taps_);
    first_[i] = available - first_[i] - taps_;
    // If there is one tap more than samples, the extra tap was the last one, with weight zero.
    for (; first_[i] < 0; ++first_[i]) std::rotate(weights, weights + 1, weights + taps_);
  }
  source_begin_ = count - source_end_;
  source_end_ = source_begin_ + available;
}

Box Resizer::start(const ts_image_geometry& g, uint8_t* dst, size_t stride, int32_t reduction) {
  const int32_t o = g.orientation;
  const bool mirrored_x = o == 2 || o == 3 || o == 6 || o == 7;
  const bool mirrored_y = o == 3 || o == 4 || o == 7 || o == 8;
  turned_ = o >= 5;
  // The samples of one side of the crop box in the stored, reduced image. A power of two divides
  // without rounding.
  const auto span = [&](int32_t at, int32_t size, int32_t* first) {
    *first = at / reduction;
    const int32_t last = (at + size + reduction - 1) / reduction;
    return Axis::Span{last - *first, static_cast<double>(at) / reduction - *first,
                      static_cast<double>(at + size) / reduction - *first};
  };
  int32_t left = 0;
  int32_t top = 0;
  const Axis::Span columns = span(g.crop_x, turned_ ? g.crop_height : g.crop_width, &left);
  const Axis::Span rows = span(g.crop_y, turned_ ? g.crop_width : g.crop_height, &top);
  // The columns of the upright image are resized before its rows, for any orientation.
  Axis& across = turned_ ? y_ : x_;
  Axis& down = turned_ ? x_ : y_;
  across.plan(turned_ ? rows : columns, g.resize_width, g.window_x, g.window_width, g.flip,
              mirrored_x, g.interpolation);
  down.plan(turned_ ? columns : rows, g.resize_height, g.window_y, g.window_height, false,
            mirrored_y, g.interpolation);
  flip_ = turned_ ? mirrored_y : g.flip != mirrored_x;
  descending_ = turned_ ? g.flip != mirrored_x : mirrored_y;
  dst_ = dst;
  dst_stride_ = stride;
  rows_in_ = 0;
  rows_out_ = 0;
  // The ring holds the sources of one output row, and the group of four rows that is being added.
  const int32_t needed = (y_.identity() ? 1 : y_.taps()) + 4;
  int32_t ring = 8;
  while (ring < needed) ring *= 2;
  ring_mask_ = ring - 1;
  taps_.resize(y_.identity() ? 0 : static_cast<size_t>(y_.taps()));
  const Box box = {left + x_.source_begin(), top + y_.source_begin(), left + x_.source_end(),
                   top + y_.source_end(), reduction};
  if (turned_) {
    line_bytes_ = static_cast<size_t>(box.width()) * kChannels;
    if (lines_bytes_ > kMaxKept) {
      lines_.clear();
      lines_bytes_ = 0;
    }
    if (lines_.size() < static_cast<size_t>(ring)) lines_.resize(static_cast<size_t>(ring));
    const size_t out_bytes = static_cast<size_t>(x_.outputs()) * kChannels + kStoreSlack;
    turning_.resize(4 * (line_bytes_ + kRowSlack) + 5 * out_bytes);
    return box;
  }
  // A row has room for the bytes that a kernel stores after its last pixel. One spare row receives
  // the outputs that belong to no row.
  ring_stride_ = (static_cast<size_t>(g.window_width) * kChannels + kStoreSlack + 63) / 64 * 64;
  ring_.resize((static_cast<size_t>(ring) + 1) * ring_stride_);
  return box;
}

void Resizer::columns(const uint8_t* const in[4], uint8_t* const out[4], int32_t count) {
  if (x_.identity()) {
    for (int32_t i = 0; i < count; ++i) {
      if (flip_) {
        mirror(in[i], out[i], x_.outputs());
      } else {
        std::memcpy(out[i], in[i], static_cast<size_t>(x_.outputs()) * kChannels);
      }
    }
    return;
  }
#if defined(__x86_64__)
  if (kernel_ == Kernel::kAvx512) {
    switch (x_.taps()) {
      case 2:
        return columns_avx512<2>(in, out, x_);
      case 4:
        return columns_avx512<4>(in, out, x_);
      case 6:
        return columns_avx512<6>(in, out, x_);
      case 8:
        return columns_avx512<8>(in, out, x_);
      default:
        return columns_avx512<0>(in, out, x_);
    }
  }
  if (kernel_ == Kernel::kAvx2) {
    switch (x_.taps()) {
      case 2:
        return columns_avx2<2>(in, out, x_);
      case 4:
        return columns_avx2<4>(in, out, x_);
      case 6:
        return columns_avx2<6>(in, out, x_);
      case 8:
        return columns_avx2<8>(in, out, x_);
      default:
        return columns_avx2<0>(in, out, x_);
    }
  }
#endif
  for (int32_t i = 0; i < count; ++i) columns_scalar(in[i], out[i], x_);
}

void Resizer::push(const uint8_t* rows, size_t stride, int32_t count) {
  if (turned_) {
    for (int32_t i = 0; i < count; ++i) keep(rows + static_cast<size_t>(i) * stride);
    return;
  }
  for (int32_t done = 0; done < count;) {
    const int32_t group = std::min(4, count - done);
    const uint8_t* in[4];
    uint8_t* out[4];
    for (int32_t i = 0; i < 4; ++i) {
      // The kernels process four rows. Missing rows repeat the first, and are written to the spare
      // row.
      const bool real = i < group;
      in[i] = rows + static_cast<size_t>(real ? done + i : done) * stride;
      out[i] = real ? ring_row(rows_in_ + i)
                    : ring_.data() + (static_cast<size_t>(ring_mask_) + 1) * ring_stride_;
    }
    columns(in, out, group);
    done += group;
    rows_in_ += group;
    emit();
  }
}

// Reports whether all sources of an output of y_ have arrived.
bool Resizer::ready(int32_t output) const {
  if (y_.identity()) return output < rows_in_;
  const int32_t available = y_.source_end() - y_.source_begin();
  return std::min(y_.first(slot(output)) + y_.taps(), available) <= rows_in_;
}

// Computes an output of y_, which is not the identity.
void Resizer::add_rows(int32_t output, size_t bytes, uint8_t* out) {
  const int32_t first = y_.first(slot(output));
  const int32_t available = y_.source_end() - y_.source_begin();
  const int32_t last = std::min(first + y_.taps(), available) - 1;
  // A tap past the last row has weight zero, so its row does not matter.
  for (int32_t k = 0; k < y_.taps(); ++k) {
    taps_[static_cast<size_t>(k)] = line(std::min(first + k, last));
  }
  const int16_t* weights = y_.weights(slot(output));
#if defined(__x86_64__)
  if (kernel_ == Kernel::kAvx512) {
    return rows_avx512(taps_.data(), weights, y_.taps(), y_.precision(), bytes, out);
  }
  if (kernel_ == Kernel::kAvx2) {
    return rows_avx2(taps_.data(), weights, y_.taps(), y_.precision(), bytes, out);
  }
#endif
  rows_scalar(taps_.data(), weights, y_.taps(), y_.precision(), 0, bytes, out);
}

void Resizer::emit() {
  const size_t bytes = static_cast<size_t>(x_.outputs()) * kChannels;
  for (; rows_out_ < y_.outputs() && ready(rows_out_); ++rows_out_) {
    uint8_t* out = dst_ + static_cast<size_t>(slot(rows_out_)) * dst_stride_;
    if (y_.identity()) {
      std::memcpy(out, line(rows_out_), bytes);
    } else {
      add_rows(rows_out_, bytes, out);
    }
  }
}

// Keeps a row of an image that is stored on its side.
void Resizer::keep(const uint8_t* row) {
  std::vector<uint8_t>& line = lines_[static_cast<size_t>(rows_in_ & ring_mask_)];
  if (line.size() < line_bytes_ + kRowSlack) {
    lines_bytes_ += line_bytes_ + kRowSlack - line.size();
    line.resize(line_bytes_ + kRowSlack);
  }
  std::memcpy(line.data(), row, line_bytes_);
  ++rows_in_;
  emit_turned();
}

// Writes the window's columns, four at a time: computes an output of y_, then all outputs of x_ for
// it.
void Resizer::emit_turned() {
  const size_t out_bytes = static_cast<size_t>(x_.outputs()) * kChannels + kStoreSlack;
  uint8_t* const results = turning_.data() + 4 * (line_bytes_ + kRowSlack);
  while (rows_out_ < y_.outputs() && ready(rows_out_)) {
    const uint8_t* in[4];
    uint8_t* out[4];
    int32_t count = 0;
    for (; count < 4 && rows_out_ + count < y_.outputs() && ready(rows_out_ + count); ++count) {
      if (y_.identity()) {
        in[count] = line(rows_out_ + count);
      } else {
        uint8_t* sum = turning_.data() + static_cast<size_t>(count) * (line_bytes_ + kRowSlack);
        add_rows(rows_out_ + count, line_bytes_, sum);
        in[count] = sum;
      }
      out[count] = results + static_cast<size_t>(count) * out_bytes;
    }
    for (int32_t i = count; i < 4; ++i) {
      in[i] = in[0];
      out[i] = results + 4 * out_bytes;
    }
    columns(in, out, count);
    for (int32_t i = 0; i < count; ++i) {
      uint8_t* to = dst_ + static_cast<size_t>(slot(rows_out_ + i)) * kChannels;
      const uint8_t* from = out[i];
      for (int32_t y = 0; y < x_.outputs(); ++y, to += dst_stride_, from += kChannels) {
        std::memcpy(to, from, kChannels);
      }
    }
    rows_out_ += count;
  }
}

}  // namespace ts::image
