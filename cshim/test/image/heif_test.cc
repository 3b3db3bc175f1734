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

// Returns the place behind a box's type and version.
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

TEST(HeifCheck, EveryTruncationIsRefused) {
  const Bytes file = file_of(kFlatHeic);
  for (size_t size = 0; size < file.size(); ++size) {
    const Bytes part(file.begin(), file.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_NE(code_of(part, int64_t{1} << 40), TS_ERROR_NONE) << size;
  }
}

}  // namespace
