// The check of HEIC and AVIF files, without libheif. The files are seeds of the fuzzer, made by
// imageloader/testdata/make_heif.py.
#include <algorithm>
#include <string>

#include "base/error.h"
#include "image/heif_check.h"
#include "image/samples.h"

namespace {

using namespace samples;

constexpr const char* kFlatAvif = "2fb984a6a7c19451";  // 400 x 300
constexpr const char* kFlatHeic = "cbe08fb9ac35822f";  // 400 x 300
constexpr const char* kGridHeic = "79abe49bd26cc662";  // 4 pictures of 64 x 64 for 110 x 98

Bytes file_of(const char* name) { return read_file(std::string("fuzz/corpus/heif_fuzz/") + name); }

// Returns the code of the check's failure, or TS_ERROR_NONE.
int32_t code_of(const Bytes& file, int64_t max_pixels) {
  try {
    ts::image::heif_check(file.data(), file.size(), max_pixels);
  } catch (const ts::Failure& failure) {
    return failure.code();
  }
  return TS_ERROR_NONE;
}

// Returns the position after a box's type and version.
size_t behind(const Bytes& file, const std::string& type) {
  const auto at = std::search(file.begin(), file.end(), type.begin(), type.end());
  return static_cast<size_t>(at - file.begin()) + type.size() + 4;
}

TEST(HeifCheck, ThePicturesCountNotTheProperties) {
  for (const char* name : {kFlatAvif, kFlatHeic}) {
    Bytes file = file_of(name);
    EXPECT_EQ(code_of(file, 4 * 400 * 300), TS_ERROR_NONE) << name;
    const size_t size = behind(file, "ispe");
    file[size + 2] = file[size + 6] = 0;  // 144 x 44
    EXPECT_EQ(code_of(file, 4 * 400 * 300), TS_ERROR_NONE) << name;
    EXPECT_EQ(code_of(file, 50000), TS_ERROR_UNSUPPORTED) << name;
  }
}

TEST(HeifCheck, GridsAreBounded) {
  Bytes file = file_of(kGridHeic);
  EXPECT_EQ(code_of(file, 1 << 16), TS_ERROR_NONE);
  const size_t data = behind(file, "idat") - 4;  // version, flags, rows, columns, width, height
  file[data + 2] = file[data + 3] = 255;
  EXPECT_EQ(code_of(file, int64_t{1} << 40), TS_ERROR_UNSUPPORTED) << "65536 pictures";
  file[data + 2] = file[data + 3] = 1;
  file[data + 4] = 255;
  EXPECT_EQ(code_of(file, 1 << 16), TS_ERROR_UNSUPPORTED) << "a width of 65390";
}

// Returns a box of the type with the content.
Bytes box(const std::string& type, const Bytes& content) {
  Bytes bytes(8 + content.size());
  for (size_t i = 0; i < 4; ++i) {
    bytes[i] = static_cast<uint8_t>(bytes.size() >> (24 - 8 * i));
    bytes[4 + i] = static_cast<uint8_t>(type[i]);
  }
  std::copy(content.begin(), content.end(), bytes.begin() + 8);
  return bytes;
}

// Returns a list of items with one box.
Bytes meta_of(const Bytes& content) {
  Bytes list(4 + content.size());
  std::copy(content.begin(), content.end(), list.begin() + 4);
  return box("meta", list);
}

// libheif 1.15 follows cyclic references until its stack overflows.
TEST(HeifCheck, CirclesAreRefused) {
  const Bytes file = file_of(kGridHeic);
  const size_t references = behind(file, "dimg") - 4;  // from, count, four parts; 16 bits each
  Bytes self = file;
  self[references + 7] = file[references + 1];
  EXPECT_EQ(code_of(self, 1 << 20), TS_ERROR_UNSUPPORTED) << "a part is the grid itself";
  Bytes missing = file;
  missing[references + 7] = 99;
  EXPECT_EQ(code_of(missing, 1 << 20), TS_ERROR_UNSUPPORTED) << "a part that there is not";

  const auto auxiliary = [](uint8_t from, uint8_t to) {
    return box("auxl", {0, from, 0, 1, 0, to});
  };
  const auto together = [](const Bytes& a, const Bytes& b) {
    Bytes list = {0, 0, 0, 0};
    list.insert(list.end(), a.begin(), a.end());
    list.insert(list.end(), b.begin(), b.end());
    return meta_of(box("iref", list));
  };
  EXPECT_EQ(code_of(together(auxiliary(1, 2), auxiliary(2, 1)), 1 << 20), TS_ERROR_UNSUPPORTED);
  EXPECT_EQ(code_of(together(auxiliary(1, 2), auxiliary(3, 2)), 1 << 20), TS_ERROR_DECODE)
      << "no properties";
}

// A few bytes announce 20,000 items of 65,535 pieces, and a million items: the check must not
// allocate memory for them.
TEST(HeifCheck, CountsWithoutBytesAreRefused) {
  Bytes places = {0, 0, 0, 0, 0, 0, 0x4E, 0x20};  // version 0, numbers of 0 bytes, 20,000 items
  for (int i = 0; i < 20000; ++i) {
    places.insert(places.end(), {static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i)});
    places.insert(places.end(), {0, 0, 0xFF, 0xFF});
  }
  EXPECT_EQ(code_of(meta_of(box("iloc", places)), 1 << 20), TS_ERROR_UNSUPPORTED) << "pieces";

  const Bytes many = box("iloc", {2, 0, 0, 0, 0, 0, 0, 0x0F, 0x42, 0x40});
  EXPECT_EQ(code_of(meta_of(many), 1 << 20), TS_ERROR_UNSUPPORTED) << "items";
}

// A sequence parameter set of HEVC of 64 x 4,194,304 pixels, in the configuration only.
TEST(HeifCheck, NarrowPicturesAreBounded) {
  Bytes bits;
  const auto put = [&](uint64_t value, int count) {
    for (int i = count - 1; i >= 0; --i) bits.push_back(static_cast<uint8_t>(value >> i & 1));
  };
  const auto exp_golomb = [&](uint64_t value) {
    int length = 1;
    while ((value + 1) >> length != 0) ++length;
    put(0, length - 1);
    put(value + 1, length);
  };
  const auto set_of = [&](uint64_t width, uint64_t height) {
    bits.clear();
    put(0, 4);
    put(0, 3);
    put(1, 1);
    for (int i = 0; i < 12; ++i) put(0xFF, 8);  // the profile and level
    exp_golomb(0);
    exp_golomb(1);
    exp_golomb(width);
    exp_golomb(height);
    Bytes unit = {33 << 1, 1};
    for (size_t i = 0; i < bits.size(); ++i) {
      if (i % 8 == 0) unit.push_back(0);
      unit.back() = static_cast<uint8_t>(unit.back() | bits[i] << (7 - i % 8));
    }
    Bytes configuration(21, 0);
    configuration.insert(configuration.end(), {3, 1, 33, 0, 1, 0});
    configuration.push_back(static_cast<uint8_t>(unit.size()));
    configuration.insert(configuration.end(), unit.begin(), unit.end());
    return meta_of(box("iprp", box("ipco", box("hvcC", configuration))));
  };
  EXPECT_EQ(code_of(set_of(64, 64), 2), TS_ERROR_NONE) << "a block may show one pixel";
  EXPECT_EQ(code_of(set_of(64, 1000), 1 << 20), TS_ERROR_NONE);
  EXPECT_EQ(code_of(set_of(64, 1000), 1000), TS_ERROR_UNSUPPORTED);
  EXPECT_EQ(code_of(set_of(64, 1 << 22), int64_t{1} << 40), TS_ERROR_UNSUPPORTED);
}

TEST(HeifCheck, EveryTruncationIsRefused) {
  const Bytes file = file_of(kFlatHeic);
  for (size_t size = 0; size < file.size(); ++size) {
    const Bytes part(file.begin(), file.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_NE(code_of(part, int64_t{1} << 40), TS_ERROR_NONE) << size;
  }
}

}  // namespace
