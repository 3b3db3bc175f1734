// The cost of each operation of ts_augmenter_run on a 224 x 224 picture.
//   image_augment_bench [REPETITIONS]
// Prints CPU nanoseconds for each image, the best of ten rounds. All of them include the copy into
// the operation's buffer and back, which a chain of operations pays once; "nothing" is this copy
// alone.
#include <algorithm>

#include "image_bench.h"
#include "operations.h"

using namespace bench;

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 50;
  constexpr int kSide = 224;
  std::mt19937 random(1);
  Bytes source(size_t{kSide} * kSide * 3);
  for (size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<uint8_t>(i / 3 % 200 + random() % 50);
  }
  ts_augmenter* augmenter = nullptr;
  check(ts_augmenter_new(&augmenter));
  for (const Operation& c : kOperations) {
    Bytes pixels = source;
    double best = 1e9;
    for (int round = 0; round < 10; ++round) {
      const double began = cpu_seconds();
      for (int i = 0; i < repetitions; ++i) {
        check(
            ts_augmenter_run(augmenter, pixels.data(), kSide, kSide, size_t{kSide} * 3, &c.op, 1));
      }
      best = std::min(best, (cpu_seconds() - began) / repetitions);
      pixels = source;
    }
    std::printf("%-26s %8.0f\n", c.name, best * 1e9);
  }
  ts_augmenter_free(augmenter);
  return 0;
}
