// Tests SIDCo's choice under sanitizers. tests/compressors compares it with NumPy.
#include "../kernels/sidco.h"

#include <algorithm>
#include <cmath>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

std::vector<int32_t> Choose(double density, const std::vector<float>& values,
                            int64_t threads = 1) {
  return ChooseBySidco(density, values.data(), values.size(), Threads(threads));
}

void AboutTheShareIsChosenAndNoLargerEntryIsLeft() {
  const std::vector<float> values = Normal(200003, 1, 1);
  for (const double density : {0.1, 0.01, 0.001}) {
    const auto places = Choose(density, values);
    const double share = places.size() / (density * values.size());
    CHECK(0.75 <= share && share <= 1.25);
    CHECK(std::is_sorted(places.begin(), places.end()));
    float smallest = INFINITY;
    for (const int32_t place : places) smallest = std::min(smallest, std::fabs(values[place]));
    int64_t as_large = 0;
    for (const float value : values) as_large += std::fabs(value) >= smallest;
    CHECK(as_large == static_cast<int64_t>(places.size()));
  }
}

void ThreadsDoNotChangeTheChoice() {
  const std::vector<float> values = Normal(300001, 0.1, 2);
  const auto places = Choose(0.005, values);
  for (const int64_t threads : {2, 7}) CHECK(Choose(0.005, values, threads) == places);
}

void FewEntriesAreChosenExactly() {
  CHECK(Choose(0.5, {1, -4, 0, 3, -2, 3}) ==
        (std::vector<int32_t>{1, 3, 5}));
  CHECK(Choose(0.3, {2, -2, 2, 2}) == std::vector<int32_t>{0});
  CHECK(Choose(0.1, {0, 0, -1e-45f}) == std::vector<int32_t>{2});
}

void ZerosAreNotChosen() {
  for (const int64_t size : {0, 1, 1023, 1024, 70001}) {
    std::vector<float> values(size);
    CHECK(Choose(0.01, values).empty());
    if (size == 0) continue;
    values.back() = -1;
    CHECK(Choose(0.01, values) ==
          std::vector<int32_t>{static_cast<int32_t>(size - 1)});
  }
}

// No threshold divides them.
void OfEqualEntriesTheFirstAreChosen() {
  const auto places = Choose(0.01, std::vector<float>(10000, -0.1f));
  CHECK(places.size() == 200);
  CHECK(places.front() == 0 && places.back() == 199);
}

void LargeAndNotFiniteValuesDoNoHarm() {
  std::vector<float> values = Normal(5000, 1, 3);
  for (const float special : {3e38f, 1e-45f, INFINITY, NAN}) {
    values[17] = special;
    const auto places = Choose(0.01, values);
    CHECK(places.size() >= 1 && places.size() <= 100);
  }
}

void DensitiesOutOfRangeAreDescribed() {
  CHECK(CheckDensity(0.5).ok());
  for (const double density : {0.0, 1.0, -1.0, static_cast<double>(NAN)}) {
    CHECK(!CheckDensity(density).ok());
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(AboutTheShareIsChosenAndNoLargerEntryIsLeft);
  RUN(ThreadsDoNotChangeTheChoice);
  RUN(FewEntriesAreChosenExactly);
  RUN(ZerosAreNotChosen);
  RUN(OfEqualEntriesTheFirstAreChosen);
  RUN(LargeAndNotFiniteValuesDoNoHarm);
  RUN(DensitiesOutOfRangeAreDescribed);
}
