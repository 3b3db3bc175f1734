// Structs that may grow: the library reads and writes only as many bytes as the caller's size
// member says.
#include <cstddef>
#include <cstring>
#include <string>

#include "image/samples.h"

namespace {

using samples::Bytes;
using samples::Decoder;
using samples::Outcome;
using samples::Random;

// A struct of a caller whose header has more members than the library's.
template <typename Struct>
struct Grown {
  Struct known;
  uint8_t rest[24];
};

template <typename Struct>
Grown<Struct> with_size(const Struct& members, size_t size) {
  Grown<Struct> given;
  std::memset(static_cast<void*>(&given), 0xA5, sizeof given);
  std::memcpy(&given.known, &members, sizeof members);
  given.known.size = size;
  return given;
}

// Makes the call with sizes that are too small, exact, and of a later version.
template <typename Struct, typename Call>
void expect_size_is_heeded(const Struct& members, Call&& call) {
  for (const size_t size : {size_t{0}, sizeof(size_t), sizeof(Struct) - 1}) {
    Grown<Struct> given = with_size(members, size);
    const Grown<Struct> before = given;
    const Outcome outcome = call(&given.known);
    EXPECT_EQ(outcome.code, TS_ERROR_INVALID_ARGUMENT) << "size " << size;
    EXPECT_NE(outcome.message.find("->size must be sizeof"), std::string::npos) << outcome.message;
    EXPECT_EQ(std::memcmp(&given, &before, sizeof given), 0) << "size " << size;
  }
  for (const size_t size : {sizeof(Struct), sizeof(Grown<Struct>)}) {
    Grown<Struct> given = with_size(members, size);
    EXPECT_EQ(call(&given.known).code, TS_ERROR_NONE) << "size " << size;
    EXPECT_EQ(given.known.size, size);
    for (const uint8_t byte : given.rest) EXPECT_EQ(byte, 0xA5) << "size " << size;
  }
  EXPECT_EQ(call(nullptr).code, TS_ERROR_INVALID_ARGUMENT);
}

TEST(Growth, InfoHeedsItsSize) {
  Random random(1);
  const Bytes file = samples::encode_jpeg(samples::picture(random, 20, 10), {});
  expect_size_is_heeded(ts_image_info{}, [&](ts_image_info* info) {
    return Outcome(ts_image_get_info(file.data(), file.size(), info));
  });
}

TEST(Growth, StatsHeedTheirSize) {
  const Decoder decoder = samples::new_decoder();
  expect_size_is_heeded(ts_image_decoder_stats{}, [&](ts_image_decoder_stats* stats) {
    return Outcome(ts_image_decoder_get_stats(decoder.get(), stats));
  });
}

// A caller whose header ends before the geometry's interpolation gets the default, and the bytes
// after its struct are not read.
TEST(Growth, GeometryOfEarlierHeadersIsAccepted) {
  Random random(1);
  const Bytes file = samples::encode_jpeg(samples::picture(random, 20, 10), {});
  const Decoder decoder = samples::new_decoder();
  const auto decode = [&](const ts_image_geometry& g, Bytes* pixels) {
    pixels->resize(7 * 5 * 3);
    return Outcome(
               ts_image_decode(decoder.get(), file.data(), file.size(), &g, pixels->data(), 7 * 3))
        .code;
  };
  ts_image_geometry g = samples::crop(0, 0, 20, 10);
  g.resize_width = g.window_width = 7;
  g.resize_height = g.window_height = 5;
  Bytes expected;
  ASSERT_EQ(decode(g, &expected), TS_ERROR_NONE);
  constexpr size_t kBefore = offsetof(ts_image_geometry, interpolation);
  static_assert(kBefore == 56, "the size of the struct in ABI 3's first headers");
  Bytes pixels;
  g.size = kBefore;
  g.interpolation = TS_INTERPOLATION_NEAREST;
  ASSERT_EQ(decode(g, &pixels), TS_ERROR_NONE);
  EXPECT_EQ(pixels, expected);
  for (size_t size = 0; size < sizeof g; ++size) {
    g.size = size;
    EXPECT_EQ(decode(g, &pixels), size == kBefore ? TS_ERROR_NONE : TS_ERROR_INVALID_ARGUMENT)
        << size;
  }
  g.size = sizeof g;
  ASSERT_EQ(decode(g, &pixels), TS_ERROR_NONE);
  EXPECT_NE(pixels, expected);
}

TEST(Growth, GeometryHeedsItsSize) {
  Random random(1);
  const Bytes file = samples::encode_jpeg(samples::picture(random, 20, 10), {});
  const Decoder decoder = samples::new_decoder();
  Bytes pixels(20 * 10 * 3);
  expect_size_is_heeded(samples::crop(0, 0, 20, 10), [&](const ts_image_geometry* geometry) {
    return Outcome(
        ts_image_decode(decoder.get(), file.data(), file.size(), geometry, pixels.data(), 20 * 3));
  });
}

}  // namespace
