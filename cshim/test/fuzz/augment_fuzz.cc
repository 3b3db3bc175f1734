// libFuzzer: lists of augmentations on small images. A list runs and gives the same pixels again,
// or is refused and leaves the pixels unchanged. The bytes between the rows never change.
#include "fuzz.h"
#include "image/augment.h"

namespace {

using namespace fuzz;

double value(Reader* in) {
  static const double kSpecial[] = {0,    -0.0,   1,    -1,    0.5,  -0.5,  0.1,     2,
                                    3.75, 1e-300, 1e-9, 1e-39, 1e30, -1e30, 1.7e308, 255};
  const auto byte = in->take<uint8_t>();
  if (byte == 0xFF) return in->take<double>();
  if (byte >= 0xF0) return in->take<float>();
  if (byte >= 0xE0) return kSpecial[byte & 15];
  return (byte - 96) / 32.0;
}

ts_augment_op operation(Reader* in, int32_t width, int32_t height) {
  ts_augment_op op = {};
  op.kind = in->number(TS_AUGMENT_FLIP_HORIZONTAL, ts::image::kAugmentKinds);
  const int32_t side = std::max(width, height);
  switch (op.kind) {
    case TS_AUGMENT_CROP:
    case TS_AUGMENT_ERASE:
      for (int i = 0; i < 9; ++i) op.integers[i] = in->number(-2, side);
      // The caller must bound the cost of a crop.
      if (op.kind == TS_AUGMENT_CROP && int64_t{op.integers[2]} * op.integers[3] > 1 << 16) {
        op.integers[2] = 0;
      }
      break;
    case TS_AUGMENT_BLUR:
      for (int i = 0; i < 2; ++i) op.integers[i] = in->number(0, 2 * side + 2);
      break;
    default:
      for (int i = 0; i < 9; ++i) op.integers[i] = in->number(-1, 9);
      if (op.kind == TS_AUGMENT_AFFINE) {  // the size of the result
        for (int i : {5, 6}) op.integers[i] = in->number(-1, 255);
      }
  }
  for (double& v : op.values) v = value(in);
  return op;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ts_augmenter* const augmenter = [] {
    ts_augmenter* made = nullptr;
    demand(ts_augmenter_new(&made) == nullptr);
    return made;
  }();
  Reader in(data, size);
  const int32_t width = 1 + in.take<uint8_t>() % 48;
  const int32_t height = 1 + in.take<uint8_t>() % 48;
  const size_t row = static_cast<size_t>(width) * 3;
  const size_t gap = in.take<uint8_t>() % 4;
  const size_t stride = row + gap;
  std::vector<ts_augment_op> ops(1 + in.take<uint8_t>() % 6);
  for (ts_augment_op& op : ops) op = operation(&in, width, height);

  // The last row ends where the memory ends.
  Bytes before(stride * static_cast<size_t>(height) - gap);
  Choices choices(data, size);
  const bool flat = choices.draw(0, 3) == 0;
  for (uint8_t& byte : before) byte = static_cast<uint8_t>(flat ? 77 : choices.draw(0, 255));
  const auto run = [&](Bytes* pixels) {
    return Outcome(ts_augmenter_run(augmenter, pixels->data(), width, height, stride, ops.data(),
                                    static_cast<int32_t>(ops.size())));
  };
  Bytes pixels(before);
  const Outcome first = run(&pixels);
  demand(first.code == TS_ERROR_NONE || first.code == TS_ERROR_INVALID_ARGUMENT);
  if (first.code != TS_ERROR_NONE) {
    demand(pixels == before);
    return 0;
  }
  for (size_t y = 0; y + 1 < static_cast<size_t>(height); ++y) {
    const size_t end = y * stride + row;
    demand(std::equal(pixels.begin() + static_cast<ptrdiff_t>(end),
                      pixels.begin() + static_cast<ptrdiff_t>(end + gap),
                      before.begin() + static_cast<ptrdiff_t>(end)));
  }
  Bytes again(before);
  demand(run(&again).code == TS_ERROR_NONE && again == pixels);
  return 0;
}
