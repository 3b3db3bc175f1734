// Decoding and resizing give the same bytes as Pillow and torchvision, which make_parity.py wrote
// to data/.
#include <zlib.h>

#include <map>
#include <sstream>

#include "image/samples.h"

namespace {

using namespace samples;

TEST(Parity, EqualsPillowAndTorchvision) {
  const Decoder decoder = new_decoder();
  std::map<std::string, Bytes> files;
  const Bytes text = read_file("data/parity.txt");
  std::istringstream lines(std::string(text.begin(), text.end()));
  int decodes = 0;
  int geometries = 0;
  int uprights = 0;
  int interpolations = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind;
    std::string name;
    int orientation = 0;
    int interpolation = TS_INTERPOLATION_DEFAULT;
    words >> kind;
    if (kind == "#") continue;
    if (kind == "interpolation") words >> interpolation;
    if (kind == "upright" || kind == "interpolation") words >> orientation;
    words >> name;
    if (files.count(name) == 0) files[name] = read_file("data/" + name);
    ts_image_geometry g = {};
    g.size = sizeof g;
    if (kind == "decode") {
      int width = 0;
      int height = 0;
      words >> width >> height;
      ts_image_info info = {};
      info.size = sizeof info;
      ASSERT_EQ(Outcome(ts_image_get_info(files[name].data(), files[name].size(), &info)).code,
                TS_ERROR_NONE)
          << name;
      EXPECT_EQ(info.width, width) << name;
      EXPECT_EQ(info.height, height) << name;
      g = crop(0, 0, width, height);
      ++decodes;
    } else {
      ASSERT_TRUE(kind == "geometry" || kind == "upright" || kind == "interpolation") << line;
      int flip = 0;
      words >> g.crop_x >> g.crop_y >> g.crop_width >> g.crop_height >> g.resize_width >>
          g.resize_height >> g.window_x >> g.window_y >> g.window_width >> g.window_height >> flip;
      g.flip = flip != 0;
      g.orientation = orientation;
      g.interpolation = interpolation;
      ++(kind == "interpolation" ? interpolations : kind == "geometry" ? geometries : uprights);
    }
    ts_image_info stored = {};
    stored.size = sizeof stored;
    ASSERT_EQ(Outcome(ts_image_get_info(files[name].data(), files[name].size(), &stored)).code,
              TS_ERROR_NONE)
        << name;
    EXPECT_EQ(stored.orientation, std::max(orientation, 1)) << name;
    uint32_t expected = 0;
    words >> std::hex >> expected;
    ASSERT_FALSE(words.fail()) << line;
    Image got;
    const Outcome outcome = decode(decoder.get(), files[name], g, &got);
    ASSERT_EQ(outcome.code, TS_ERROR_NONE) << line << ": " << outcome.message;
    EXPECT_EQ(crc32(0, got.pixels.data(), static_cast<unsigned>(got.pixels.size())), expected)
        << line;
  }
  EXPECT_EQ(decodes, 20);
  EXPECT_EQ(geometries, 20 * 24);
  EXPECT_EQ(uprights, 10 * 7);
  EXPECT_EQ(interpolations, 15 * 24 * 2);
}

}  // namespace
