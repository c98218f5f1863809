// Tests sums at a leader's places under sanitizers. tests/compressors and tests/ops compare them
// with NumPy's.
#include "../kernels/leader_selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

// A tensor of several blocks, small tensors, a tensor that is sent whole, empty tensors, and a
// tensor whose entries are all chosen.
const std::vector<int64_t> kSizes = {300001, 7, 0, 70003, 1, 131073, 0};
const std::vector<int64_t> kEntries = {3001, 2, 0, 0, 1, 131073, 0};

struct Replica {
  std::vector<std::vector<float>> residuals;
  std::vector<std::vector<float>> gradients;

  Replica() {
    for (size_t i = 0; i < kSizes.size(); ++i) {
      residuals.push_back(Normal(kSizes[i], 1, i));
      gradients.push_back(Normal(kSizes[i], 0.3f, 100 + i));
    }
  }

  std::vector<Source> Tensors() {
    std::vector<Source> tensors;
    for (size_t i = 0; i < residuals.size(); ++i) {
      tensors.push_back({residuals[i].data(), gradients[i].data(), GradientType::kFloat});
    }
    return tensors;
  }

  float Sum(int64_t tensor, int64_t element) const {
    return residuals[tensor][element] + gradients[tensor][element];
  }
};

// Finds the places by sorting all entries.
std::vector<int32_t> ChosenBySort(const Replica& replica, int64_t tensor, EntryOrder order) {
  if (kEntries[tensor] == 0) return {};
  std::vector<int32_t> places(kSizes[tensor]);
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), [&](int32_t a, int32_t b) {
    return std::fabs(replica.Sum(tensor, a)) > std::fabs(replica.Sum(tensor, b));
  });
  places.resize(kEntries[tensor]);
  if (order == EntryOrder::kMagnitude) return places;
  std::sort(places.begin(), places.end());
  if (order == EntryOrder::kIndex) return places;
  std::stable_sort(places.begin(), places.end(), [&](int32_t a, int32_t b) {
    return replica.Sum(tensor, a) < replica.Sum(tensor, b);
  });
  return places;
}

void CheckChosen(Replica* replica) {
  const LeaderLayout layout(kSizes, kEntries);
  for (EntryOrder order : {EntryOrder::kValue, EntryOrder::kIndex, EntryOrder::kMagnitude}) {
    std::vector<std::vector<int32_t>> expected;
    for (size_t i = 0; i < kSizes.size(); ++i) expected.push_back(ChosenBySort(*replica, i, order));
    for (int64_t threads : {1, 3}) {
      std::vector<int32_t> places(layout.num_place_words(), -1);
      CHECK(ChooseEntries(layout, replica->Tensors(), order, Threads(threads), places.data()));
      CHECK(CheckPlaces(layout, places.data()).ok());
      for (size_t i = 0; i < kSizes.size(); ++i) {
        const LeaderLayout::Tensor& tensor = layout.tensors()[i];
        for (int64_t entry = 0; entry < tensor.entries; ++entry) {
          CHECK(PlaceAt(tensor, places.data(), entry) == expected[i][entry]);
        }
      }
    }
  }
}

void TheLargestAreChosenInEachOrder() {
  Replica replica;
  CheckChosen(&replica);
}

void OfEqualMagnitudesTheFirstAreChosen() {
  Replica replica;
  for (auto& residual : replica.residuals) std::fill(residual.begin(), residual.end(), 0.0f);
  for (auto& gradient : replica.gradients) {
    for (float& value : gradient) value = std::round(3 * value);
  }
  CheckChosen(&replica);
}

void WhatIsNotSentIsKept() {
  const LeaderLayout layout(kSizes, kEntries);
  const int64_t num_rests = layout.tensors()[1].first_value;  // the first tensor's values
  for (int64_t threads : {1, 3}) {
    Replica replica;
    const Replica before = replica;
    std::vector<int32_t> places(layout.num_place_words());
    ChooseEntries(layout, replica.Tensors(), EntryOrder::kValue, Threads(threads), places.data());
    std::vector<float> values(layout.num_values());
    TakeEntries(layout, replica.Tensors(), places.data(), Threads(threads), values.data());
    std::vector<float> rests(num_rests);
    std::vector<float> totals = values;
    for (int64_t i = 0; i < num_rests; ++i) {
      totals[i] = std::round(values[i]);
      rests[i] = values[i] - totals[i];
    }
    std::vector<std::vector<float>> outputs;
    for (int64_t size : kSizes) outputs.emplace_back(size, 7.0f);
    ApplyEntries(layout, replica.Tensors(), places.data(), totals.data(),
                 {rests.data(), num_rests}, Threads(threads), Pointers(&outputs));
    for (size_t i = 0; i < kSizes.size(); ++i) {
      int64_t sent = 0;
      for (int64_t j = 0; j < kSizes[i]; ++j) {
        CHECK(outputs[i][j] + replica.residuals[i][j] == before.Sum(i, j));
        CHECK(i == 0 || outputs[i][j] == 0 || replica.residuals[i][j] == 0);
        sent += outputs[i][j] != 0;
      }
      CHECK(sent <= (kEntries[i] == 0 ? kSizes[i] : kEntries[i]));
    }
    Replica skipped;
    KeepEntries(layout, skipped.Tensors(), Threads(threads));
    for (size_t i = 0; i < kSizes.size(); ++i) {
      for (int64_t j = 0; j < kSizes[i]; ++j) CHECK(skipped.residuals[i][j] == before.Sum(i, j));
    }
  }
}

void WhatIsNotFiniteIsFoundInEachTensor() {
  const LeaderLayout layout(kSizes, kEntries);
  std::vector<int32_t> places(layout.num_place_words(), 1);
  CHECK(AllSumsFinite(layout, Replica().Tensors(), Threads(2)));
  for (size_t i = 0; i < kSizes.size(); ++i) {
    if (kSizes[i] == 0) continue;
    for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      Replica replica;
      replica.gradients[i].back() = bad;
      CHECK(!AllSumsFinite(layout, replica.Tensors(), Threads(2)));
      CHECK(!ChooseEntries(layout, replica.Tensors(), EntryOrder::kValue, Threads(2),
                           places.data()));
      CHECK(std::count(places.begin(), places.end(), 0) == layout.num_place_words());
    }
  }
}

void PlacesOutsideOfTheirTensorAreRefused() {
  const LeaderLayout layout(kSizes, kEntries);
  for (int32_t bad : {7, 7 << 3, 1 << 6, -1, std::numeric_limits<int32_t>::max()}) {
    std::vector<int32_t> places(layout.num_place_words(), 0);
    CHECK(CheckPlaces(layout, places.data()).ok());
    places[layout.tensors()[1].first_place_word] = bad;  // the word of two places of 3 bits
    CHECK(CheckPlaces(layout, places.data()).message.find("tensor 1") == 0);
  }
}

void PlacesOfTheLargestTensorsArePacked() {
  const int64_t size = std::numeric_limits<int32_t>::max();
  const LeaderLayout layout({size, size - 1}, {3, 33});
  CHECK(layout.num_place_words() == 3 + 32);
  std::vector<int32_t> places(layout.num_place_words(), -1);
  places[2] = (1 << 29) - 1;  // 93 bits
  for (const auto& tensor : layout.tensors()) {
    for (int64_t entry = 0; entry < tensor.entries; ++entry) {
      CHECK(PlaceAt(tensor, places.data(), entry) == size);
    }
  }
}

void NumbersOfEntriesThatNoTensorHasAreRefused() {
  CHECK(CheckEntries(kSizes, kEntries).ok());
  CHECK(!CheckEntries({5, 5}, {5}).ok());
  CHECK(!CheckEntries({5}, {6}).ok());
  CHECK(!CheckEntries({5}, {-1}).ok());
  CHECK(!CheckEntries({int64_t{1} << 31}, {1}).ok());
  CHECK(CheckEntries({int64_t{1} << 31}, {0}).ok());
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(TheLargestAreChosenInEachOrder);
  RUN(OfEqualMagnitudesTheFirstAreChosen);
  RUN(WhatIsNotSentIsKept);
  RUN(WhatIsNotFiniteIsFoundInEachTensor);
  RUN(PlacesOutsideOfTheirTensorAreRefused);
  RUN(PlacesOfTheLargestTensorsArePacked);
  RUN(NumbersOfEntriesThatNoTensorHasAreRefused);
}
