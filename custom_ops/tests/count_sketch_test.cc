// Tests count sketches under sanitizers. tests/compressors compares them with NumPy.
#include "../kernels/count_sketch.h"

#include <limits>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

// Philox 4x32-10, one counter at a time.
uint32_t Word(const SketchSettings& settings, int64_t row, int64_t entry) {
  const uint64_t low = (static_cast<uint64_t>(row) << 40) + entry / 4;
  const uint64_t high = settings.step;
  uint32_t words[4] = {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                       static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
  uint32_t keys[2] = {0, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xd2511f53} * words[0];
    const uint64_t second = uint64_t{0xcd9e8d57} * words[2];
    words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ keys[0];
    words[1] = static_cast<uint32_t>(second);
    words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ keys[1];
    words[3] = static_cast<uint32_t>(first);
    keys[0] += 0x9e3779b9;
    keys[1] += 0xbb67ae85;
  }
  return words[entry % 4];
}

std::vector<float> SketchOf(const SketchSettings& settings, const std::vector<float>& values,
                            int64_t threads) {
  std::vector<float> sums(kSketchRows * settings.columns, -1);
  Sketch(settings, values.data(), values.size(), Threads(threads), sums.data());
  return sums;
}

std::vector<int32_t> LargestOf(const SketchSettings& settings, const std::vector<float>& sums,
                               int64_t size, int64_t count, int64_t threads) {
  std::vector<float> estimates(size);
  std::vector<int32_t> places(count, -1);
  LargestOfSketch(settings, sums.data(), size, count, Threads(threads), estimates.data(),
                  places.data());
  return places;
}

void AddsEachEntryToItsColumn() {
  for (const int64_t columns : {1, 7, 4000, 1000003}) {
    for (const int64_t size : {0, 1, 5, 1024, 3001}) {
      const SketchSettings settings = {int64_t{5} << 33, columns};
      const std::vector<float> values = Normal(4000, 1, 1);
      std::vector<float> expected(3 * columns);
      for (int64_t row = 0; row < 3; ++row) {
        for (int64_t i = 0; i < size; ++i) {
          const uint32_t word = Word(settings, row, i);
          const float value = word & kSignBit ? -values[i] : values[i];
          expected[row * columns + (word & ~kSignBit) % columns] += value;
        }
      }
      const std::vector<float> given(values.begin(), values.begin() + size);
      CHECK(SketchOf(settings, given, 1) == expected);
      CHECK(SketchOf(settings, given, 3) == expected);
    }
  }
}

void FindsLargeEntriesInOrder() {
  const int64_t size = 300001;
  const SketchSettings settings = {2, 1 << 12};
  std::vector<float> values(size);
  values[7] = 5;
  values[200000] = -6;
  values[300000] = 4;
  const std::vector<float> sums = SketchOf(settings, values, 2);
  const std::vector<int32_t> places = LargestOf(settings, sums, size, 3, 1);
  CHECK((places == std::vector<int32_t>{200000, 7, 300000}));
  CHECK(LargestOf(settings, sums, size, 1000, 1) == LargestOf(settings, sums, size, 1000, 4));
}

void SumsOfNanCountAsInfinite() {
  const SketchSettings settings = {2, 1};
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<int32_t> places = LargestOf(settings, {kNan, kNan, 1e38f}, 50, 50, 1);
  // An estimate is infinite where the signs of the first two rows agree, and otherwise 1e38.
  const auto rank = [&](int32_t place) {
    return (Word(settings, 0, place) ^ Word(settings, 1, place)) & kSignBit;
  };
  for (size_t i = 1; i < places.size(); ++i) {
    CHECK(rank(places[i - 1]) <= rank(places[i]));
    CHECK(rank(places[i - 1]) < rank(places[i]) || places[i - 1] < places[i]);
  }
}

void RefusesWrongSettings() {
  CHECK(CheckSketch({0, 1}).ok());
  CHECK(!CheckSketch({0, 0}).ok());
  CHECK(!CheckSketch({0, int64_t{1} << 31}).ok());
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(AddsEachEntryToItsColumn);
  RUN(FindsLargeEntriesInOrder);
  RUN(SumsOfNanCountAsInfinite);
  RUN(RefusesWrongSettings);
}
