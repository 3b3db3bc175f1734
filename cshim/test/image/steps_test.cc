// The operations that a device runs after the resize (jpeg/steps.h), emulated on the host, give the
// bytes of the host's operations, whatever the order of the threads.
#include "jpeg/steps.h"

#include <limits>

#include "image/augment.h"
#include "image/emulate.h"
#include "image/steps.h"

namespace {

using namespace samples;

Image draw_image(Random& random) {
  const bool square = random() % 3 == 0;
  const int width = uniform(random, 1, 48);
  Image image = picture(random, width, square ? width : uniform(random, 1, 48));
  const uint32_t how = random() % 6;
  for (uint8_t& byte : image.pixels) {
    if (how == 0) byte = 77;                              // one value
    if (how == 1) byte = static_cast<uint8_t>(random());  // noise
    if (how == 2) byte = static_cast<uint8_t>(40 + byte / 8);
  }
  return image;
}

// Returns a plan of an image of the given size, without the parts for decoding.
std::vector<uint64_t> bare_plan(int32_t width, int32_t height, size_t room) {
  ts::jpeg::Plan plan = {};
  plan.magic = ts::jpeg::kPlanMagic;
  plan.bytes = (sizeof plan + 15) / 16 * 16;
  plan.x.size = plan.x.source_size = width;
  plan.y.size = plan.y.source_size = height;
  std::vector<uint64_t> memory(2 * ((plan.bytes + room + 15) / 16));
  std::memcpy(memory.data(), &plan, sizeof plan);
  return memory;
}

uint8_t* bytes_of(std::vector<uint64_t>* memory) {
  return reinterpret_cast<uint8_t*>(memory->data());
}

// Runs operations as a device does. Every piece of memory has exactly its size.
Bytes run_on_device(const Image& image, const Ops& ops, bool backwards) {
  size_t bytes = ops.size() * sizeof(ts_augment_op);
  for (const ts_augment_op& op : ops) {
    if (op.kind == TS_AUGMENT_BLUR)
      bytes += 4 * static_cast<size_t>(op.integers[0] + op.integers[1]);
  }
  std::vector<uint64_t> memory = bare_plan(image.width, image.height, bytes);
  uint8_t* const base = bytes_of(&memory);
  size_t planned = 0;
  const Outcome outcome(ts_image_plan_augment(base, memory.size() * 8, ops.data(),
                                              static_cast<int64_t>(ops.size()), &planned));
  EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  EXPECT_EQ(planned, memory.size() * 8) << "of operation " << ops[0].kind;
  Bytes result = image.pixels;
  Bytes room(ts::jpeg::scratch_of(ts::jpeg::plan_at(base)).room);
  ts::jpeg::Memory at = {};
  at.base = base;
  at.room = room.data();
  at.result = result.data();
  const auto state = std::make_unique<ts::jpeg::StepState>();
  ts::jpeg::StepLoop team = {backwards};
  ts::jpeg::run_steps(team, ts::jpeg::plan_at(base), at, state.get());
  return result;
}

TEST(Steps, EachEqualsTheHosts) {
  Random random(91);
  const HostAugmenter augmenter = new_host_augmenter();
  for (int32_t kind = TS_AUGMENT_FLIP_HORIZONTAL; kind <= ts::image::kAugmentKinds; ++kind) {
    if (kind == TS_AUGMENT_MIX) continue;  // only in lists
    int changed = 0;
    for (int i = 0; i < 300 * rounds(); ++i) {
      const Image image = draw_image(random);
      const Ops ops = {draw_step(random, kind, image.width, image.height)};
      const Bytes expected = run_on_host(augmenter.get(), image, ops);
      changed += expected != image.pixels;
      for (const bool backwards : {false, true}) {
        ASSERT_EQ(run_on_device(image, ops, backwards), expected)
            << "operation " << kind << ", image " << i << ": " << image.width << " x "
            << image.height << (backwards ? ", backwards" : "");
      }
    }
    EXPECT_GT(changed, 100 * rounds()) << kind;
  }
}

TEST(Steps, ListsEqualTheHosts) {
  Random random(92);
  const HostAugmenter augmenter = new_host_augmenter();
  for (int i = 0; i < 2000 * rounds(); ++i) {
    const Image image = draw_image(random);
    const Ops ops = draw_steps(random, 9, image.width, image.height);
    if (ops.empty()) continue;
    const Bytes expected = run_on_host(augmenter.get(), image, ops);
    ASSERT_EQ(run_on_device(image, ops, i % 2 == 0), expected) << i;
  }
}

// A tile of a blur is part of a wide image's row, and of a high image's column.
TEST(Steps, LargeBlursEqualTheHosts) {
  Random random(94);
  const HostAugmenter augmenter = new_host_augmenter();
  for (const int32_t kernel : {1, 23, 1001}) {
    for (const auto& [width, height] :
         {std::pair(2500, 3), std::pair(3, 2500), std::pair(1100, 40)}) {
      const Image image = picture(random, width, height);
      ts_augment_op op = {TS_AUGMENT_BLUR, {kernel, kernel}, {9, 5}};
      op.integers[0] = std::min(kernel, 2 * width - 1);
      op.integers[1] = std::min(kernel, 2 * height - 1);
      const Bytes expected = run_on_host(augmenter.get(), image, {op});
      ASSERT_EQ(run_on_device(image, {op}, width < height), expected) << kernel << ", " << width;
    }
  }
}

// A device accesses only its memory, even if something damages the parameters.
TEST(Steps, AnyParametersDoNoHarm) {
  Random random(93);
  for (int i = 0; i < 4000 * rounds(); ++i) {
    const Image image = draw_image(random);
    const int32_t kind = uniform(random, -1, ts::image::kAugmentKinds + 1);
    std::vector<uint64_t> memory = bare_plan(image.width, image.height, sizeof(ts_augment_op));
    uint8_t* const base = bytes_of(&memory);
    auto* const plan = reinterpret_cast<ts::jpeg::Plan*>(base);
    plan->steps = 1;
    plan->steps_at = plan->bytes;
    plan->mixes = random() % 2;
    ts_augment_op op = {};
    op.kind = kind;
    for (int32_t& v : op.integers) {
      v = random() % 2 == 0 ? uniform(random, -300, 300) : static_cast<int32_t>(random() / 4);
    }
    // Its weights are arbitrary bytes of the plan.
    if (kind == TS_AUGMENT_BLUR && random() % 2 == 0) {
      op.integers[0] = 1 + 2 * uniform(random, 0, image.width - 1);
      op.integers[1] = 1 + 2 * uniform(random, 0, image.height - 1);
      op.integers[2] = uniform(random, -8, static_cast<int>(plan->bytes));
    }
    for (double& v : op.values) v = real(random, -1, 1) * (random() % 2 == 0 ? 1 : 1e30);
    if (random() % 4 == 0) op.values[random() % 8] = std::numeric_limits<double>::quiet_NaN();
    if (kind == TS_AUGMENT_HUE) op.values[0] = real(random, -0.5, 0.5);
    std::memcpy(base + plan->steps_at, &op, sizeof op);
    Bytes result = image.pixels;
    Bytes room(ts::jpeg::scratch_of(*plan).room);
    ts::jpeg::Memory at = {};
    at.base = base;
    at.room = room.data();
    at.result = result.data();
    ts::jpeg::StepState state;
    ts::jpeg::StepLoop team;
    ts::jpeg::run_steps(team, *plan, at, &state);
  }
}

TEST(Steps, WhatOnlyTheHostRunsIsNotPlanned) {
  const ts_augment_op invert = {TS_AUGMENT_INVERT, {}, {}};
  const ts_augment_op pad = {TS_AUGMENT_CROP, {-1, -1, 19, 11}, {}};
  const ts_augment_op crop = {TS_AUGMENT_CROP, {1, 1, 17, 9}, {}};
  const ts_augment_op turn = {TS_AUGMENT_QUARTER_TURNS, {1}, {}};
  const Ops lists[] = {{pad, crop}, {invert, pad, crop}, {turn, turn}};
  for (const Ops& ops : lists) {
    std::vector<uint64_t> memory = bare_plan(17, 9, 4096);
    const std::vector<uint64_t> before = memory;
    size_t planned = 1;
    const Outcome outcome(ts_image_plan_augment(bytes_of(&memory), memory.size() * 8, ops.data(),
                                                static_cast<int64_t>(ops.size()), &planned));
    EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
    EXPECT_EQ(planned, 0u) << ops[0].kind;
    EXPECT_EQ(memory, before) << ops[0].kind;
  }
}

TEST(Steps, CFunctionChecksItsArguments) {
  const ts_augment_op invert = {TS_AUGMENT_INVERT, {}, {}};
  std::vector<uint64_t> memory = bare_plan(17, 9, 4096);
  uint8_t* const base = bytes_of(&memory);
  const size_t bare = ts::jpeg::plan_at(base).bytes;
  const std::vector<uint64_t> before = memory;
  size_t planned = 1;
  const auto call = [&](uint8_t* to, size_t capacity, const Ops& ops) {
    return Outcome(ts_image_plan_augment(to, capacity, ops.data(), static_cast<int64_t>(ops.size()),
                                         &planned));
  };
  EXPECT_EQ(call(base, bare, {}).code, TS_ERROR_NONE);
  EXPECT_EQ(planned, bare);
  EXPECT_EQ(call(base, bare, {invert}).code, TS_ERROR_NONE);  // no room left
  EXPECT_GT(planned, bare);
  const size_t needed = planned;
  EXPECT_EQ(call(base, needed - 1, {invert}).code, TS_ERROR_NONE);
  EXPECT_EQ(planned, needed);
  planned = 7;
  EXPECT_EQ(call(nullptr, 4096, {invert}).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(base + 8, needed, {invert}).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(base, sizeof(ts::jpeg::Plan) - 1, {invert}).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(base, bare - 1, {invert}).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(base, needed, {{TS_AUGMENT_POSTERIZE, {9}, {}}}).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(base, needed, {{TS_AUGMENT_CROP, {0, 0, 16, 9}, {}}}).code,
            TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(base, needed, {{TS_AUGMENT_MIX, {0}, {0.5}}}).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(Outcome(ts_image_plan_augment(base, needed, nullptr, 1, &planned)).code,
            TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(Outcome(ts_image_plan_augment(base, needed, nullptr, -1, &planned)).code,
            TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(Outcome(ts_image_plan_augment(base, needed, nullptr, 0, nullptr)).code,
            TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(planned, 7u);
  EXPECT_EQ(memory, before);
  EXPECT_EQ(call(base, needed, {invert}).code, TS_ERROR_NONE);
  EXPECT_EQ(planned, needed);
  EXPECT_EQ(call(base, 4096, {invert}).code, TS_ERROR_INVALID_ARGUMENT);  // it has operations
  memory[0] = 0;
  EXPECT_EQ(call(base, 4096, {invert}).code, TS_ERROR_INVALID_ARGUMENT);  // not a plan
}

}  // namespace
