// Tests TopK's kernels under sanitizers. tests/compressors and tests/ops compare their results with
// NumPy's.
#include "../kernels/top_k_codec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "../kernels/momentum.h"
#include "../kernels/whole_codec.h"
#include "check.h"
#include "fixed_length_support.h"

namespace gradcomp {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Codecs TopKAlone(int64_t size, int64_t entries) {
  Codecs codecs;
  codecs.push_back(std::make_unique<TopKCodec>(size, entries));
  return codecs;
}

// Sorts the places by the magnitudes of their entries.
std::vector<int32_t> ByMagnitude(const std::vector<float>& values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::fabs(values[a]) > std::fabs(values[b]);
  });
  return order;
}

void CheckSelection(const std::vector<float>& values, std::vector<int32_t> largest) {
  const int64_t size = values.size();
  const int64_t entries = largest.size();
  std::sort(largest.begin(), largest.end());
  for (int64_t threads : {1, 3}) {
    Tensors residuals = {std::vector<float>(size)};
    const auto payload = EncodeFixed(Method::kTopK, TopKAlone(size, entries), &residuals, {values},
                                     Threads(threads));
    const int32_t* index = payload.data() + kHeaderWords;
    CHECK(std::equal(largest.begin(), largest.end(), index));
    std::vector<float> kept = values;
    for (int64_t i = 0; i < entries; ++i) {
      CHECK(ToBits(values[index[i]]) == static_cast<uint32_t>(index[entries + i]));
      kept[index[i]] = 0;
    }
    CHECK(SameBits(residuals[0], kept));
  }
}

void CheckSelections(std::vector<float> values) {
  const int64_t size = values.size();
  for (float& value : values) value += 0.0f;  // adding a residual of 0 turns -0 into 0
  const std::vector<int32_t> order = ByMagnitude(values);
  for (int64_t entries : {int64_t{1}, int64_t{2}, size / 100, size / 3, size - 1, size}) {
    if (entries < 1 || entries > size) continue;
    CheckSelection(values, {order.begin(), order.begin() + entries});
  }
}

void TheLargestEntriesAreSent() {
  for (int64_t size : {1, 2, 3, 100, 1023, 1024, 1025, 131071, 131072, 131073, 300001}) {
    CheckSelections(Normal(size, 1, size));
  }
}

void OfEqualMagnitudesTheFirstAreSent() {
  for (int64_t size : {5, 1030, 270000}) {
    for (uint32_t kinds : {1, 2, 7}) {
      std::mt19937 engine(kinds);
      std::vector<float> values(size);
      for (float& value : values) value = (engine() % 2 ? 1.0f : -1.0f) * (engine() % kinds);
      CheckSelections(values);
    }
  }
}

// Tests magnitudes that differ in one bit, in each of the digits, and denormals.
void MagnitudesThatDifferInOneBitAreToldApart() {
  for (int bit = 0; bit < 31; ++bit) {
    std::mt19937 engine(bit);
    std::vector<float> values(2000);
    const uint32_t other = bit == 30 ? 0 : 0x40000000u;
    for (float& value : values) {
      value = FromBits((engine() % 2 ? kSignBit : 0) | (engine() % 3 ? 0 : 1u << bit) | other >> 1);
    }
    CheckSelections(values);
  }
}

void NothingIsWrittenWhenAValueIsNotFinite() {
  for (float bad : {kInfinity, -kInfinity, std::nanf(""), 3e38f}) {
    Codecs codecs;
    codecs.push_back(std::make_unique<TopKCodec>(200000, 30));
    codecs.push_back(std::make_unique<WholeCodec>(70));
    codecs.push_back(std::make_unique<TopKCodec>(200001, 20));
    Tensors residuals = NormalTensors(codecs, 1, 1);
    Tensors gradients = NormalTensors(codecs, 1, 10);
    gradients[2][200000] = bad;
    residuals[2][200000] = 3e38f;
    const Tensors before = residuals;
    const auto payload = EncodeFixed(Method::kTopK, codecs, &residuals, gradients, Threads(2));
    for (size_t i = 0; i < codecs.size(); ++i) CHECK(SameBits(residuals[i], before[i]));
    FixedLengthDecoder decoder(codecs, Method::kTopK, kFingerprint, kPlan, Threads(1));
    CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
    CHECK(!decoder.finite());
    CHECK(!decoder.Reduce(Pointers(&gradients)));
    decoder.AddTo(Pointers(&residuals));
    for (size_t i = 0; i < codecs.size(); ++i) CHECK(SameBits(residuals[i], before[i]));
  }
}

void WhatWasPackedCanBePutBackToTheBit() {
  const Codecs codecs = TopKAlone(300001, 5000);
  Tensors residuals = NormalTensors(codecs, 1, 1);
  const Tensors gradients = NormalTensors(codecs, 1, 2);
  std::vector<float> sums = residuals[0];
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += gradients[0][i];
  const auto payload = EncodeFixed(Method::kTopK, codecs, &residuals, gradients, Threads(2));
  CHECK(!SameBits(residuals[0], sums));
  FixedLengthDecoder decoder(codecs, Method::kTopK, kFingerprint, kPlan, Threads(2));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), std::nullopt).ok());
  decoder.AddTo(Pointers(&residuals));
  CHECK(SameBits(residuals[0], sums));
}

void EveryBitFlipIsAnError() {
  Codecs codecs = TopKAlone(300, 20);
  codecs.push_back(std::make_unique<WholeCodec>(5));
  Tensors residuals = NormalTensors(codecs, 1, 1);
  auto payload =
      EncodeFixed(Method::kTopK, codecs, &residuals, NormalTensors(codecs, 1, 2), Threads(1));
  FixedLengthDecoder decoder(codecs, Method::kTopK, kFingerprint, kPlan, Threads(1));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  for (size_t word = 0; word < payload.size(); ++word) {
    for (int bit = 0; bit < 32; ++bit) {
      payload[word] ^= 1u << bit;
      const Status status = decoder.Read(payload.data(), 1, payload.size(), kStep);
      CHECK(status.message.find("payload of replica 0: ") == 0);
      payload[word] ^= 1u << bit;
    }
  }
}

void CorrectedGradientsAreTheSameOnAnyNumberOfThreads() {
  const std::vector<int64_t> sizes = {0, 1, 7, 65536, 65537, 200003};
  Tensors first;
  for (int64_t threads : {1, 3}) {
    Tensors velocities;
    Tensors gradients;
    Tensors corrected;
    std::vector<MomentumTensor> tensors;
    for (int64_t size : sizes) {
      velocities.push_back(Normal(size, 1, size));
      gradients.push_back(Normal(size, 1, size + 1));
      corrected.emplace_back(size);
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      tensors.push_back({velocities[i].data(), gradients[i].data(), GradientType::kFloat, sizes[i],
                         corrected[i].data()});
    }
    const float scale = ClipScale(tensors, 10, Threads(threads));
    CHECK(scale > 0.0172f && scale < 0.0176f);  // 10 divided by the root of 331,084
    CHECK(ClipScale(tensors, kInfinity, Threads(threads)) == 1);
    CorrectMomentum(tensors, scale, 0.9f, Threads(threads));
    if (threads == 1) first = corrected;
    for (size_t i = 0; i < sizes.size(); ++i) CHECK(SameBits(corrected[i], first[i]));
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(TheLargestEntriesAreSent);
  RUN(OfEqualMagnitudesTheFirstAreSent);
  RUN(MagnitudesThatDifferInOneBitAreToldApart);
  RUN(NothingIsWrittenWhenAValueIsNotFinite);
  RUN(WhatWasPackedCanBePutBackToTheBit);
  RUN(EveryBitFlipIsAnError);
  RUN(CorrectedGradientsAreTheSameOnAnyNumberOfThreads);
}
