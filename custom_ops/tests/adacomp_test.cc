// Tests AdaComp's kernels under sanitizers. tests/ops compares their results with NumPy's.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../kernels/adacomp_codes.h"
#include "../kernels/past_caches.h"
#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

const std::vector<int64_t> kSizes = {0, 1, 3, 15, 16, 17, 49, 50, 51, 63, 64, 65, 500, 1000, 70001};
const std::vector<int64_t> kBinSizes = {0, 1, 4, 15, 16, 17, 50, 63, 64, 65, 500, 16383};

// Takes a step in which new residuals replace gradients, as Encode takes one in place.
std::vector<int32_t> EncodeReplacing(Tensors* residuals, Tensors gradients,
                                     const std::vector<int64_t>& bin_sizes,
                                     const EncodeSettings& settings = {}) {
  const Tensors before = *residuals;
  std::vector<EncoderTensor> tensors;
  for (size_t i = 0; i < gradients.size(); ++i) {
    float* gradient = gradients[i].data();
    tensors.push_back({(*residuals)[i].data(), gradient, GradientType::kFloat,
                       static_cast<int64_t>(gradients[i].size()), bin_sizes[i]});
    tensors.back().replaced_gradient = gradient;
  }
  const auto payload = PayloadOf(tensors, settings);
  for (size_t i = 0; i < before.size(); ++i) CHECK(SameBits((*residuals)[i], before[i]));
  if (static_cast<int64_t>(payload.size()) > kHeaderWords) *residuals = std::move(gradients);
  return payload;
}

template <typename Gradient>
void CheckVariantsAgree(GradientType type, const std::vector<Gradient>& gradient) {
  const int64_t size = gradient.size();
  for (int64_t bin_size : kBinSizes) {
    for (float scale_factor : {1.0f, 1.7f, 2.0f}) {
      Tensors expected = {Normal(size, 1, 1)};
      EncodeSettings settings = {scale_factor, Threads(1), Simd::kPortable, type};
      const auto payload = Encode<Gradient>(&expected, {gradient}, {bin_size}, settings);
      for (Simd simd : {Simd::kPortable, Simd::kAvx2, Simd::kAvx512}) {
        if (!IsSupported(simd)) continue;
        settings.simd = simd;
        Tensors residual = {Normal(size, 1, 1)};
        CHECK(Encode<Gradient>(&residual, {gradient}, {bin_size}, settings) == payload);
        CHECK(SameBits(residual[0], expected[0]));
        if constexpr (std::is_same_v<Gradient, float>) {
          residual = {Normal(size, 1, 1)};
          CHECK(EncodeReplacing(&residual, {gradient}, {bin_size}, settings) == payload);
          CHECK(SameBits(residual[0], expected[0]));
        }
      }
    }
  }
}

void AllInstructionSetsGiveTheSameBits() {
  for (int64_t size : kSizes) {
    CheckVariantsAgree(GradientType::kFloat, Normal(size, 0.3f, 2));
    CheckVariantsAgree(GradientType::kHalf, Halves(size, 3));
    CheckVariantsAgree(GradientType::kBFloat16, BrainFloats(size, 0.3f, 4));
  }
}

void ZerosDenormalsAndTiesAreTheSameInAllInstructionSets() {
  const std::vector<float> special = {0.0f,    -0.0f, 1e-45f, -1e-45f, 1e-39f, 1.0f,
                                      -1.0f,   1.0f,  0.5f,   3e38f,   -3e38f, 1.17549435e-38f};
  std::mt19937 engine(5);
  std::vector<float> gradient(3000);
  for (float& value : gradient) value = special[engine() % special.size()] * 0.5f;
  CheckVariantsAgree(GradientType::kFloat, gradient);
}

// Bins of zeros are not written where they stay zero.
void SignsOfZerosAreThoseOfSums() {
  const std::vector<float> residual = {0.0f, -0.0f, 0.0f, -0.0f, -0.0f, -0.0f, 0.0f, 0.0f, 0.0f};
  const std::vector<float> gradient = {0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f, 1.0f};
  for (int64_t bin_size : {0, 1, 2, 8}) {
    Tensors in_place = {residual}, replacing = {residual};
    const auto payload = Encode<float>(&in_place, {gradient}, {bin_size});
    CHECK(EncodeReplacing(&replacing, {gradient}, {bin_size}) == payload);
    CHECK(SameBits(replacing[0], in_place[0]));
    for (size_t i = 0; i < 8 && bin_size > 0; ++i) {
      const float sum = residual[i] + gradient[i];
      CHECK(ToBits(in_place[0][i]) == ToBits(sum));
    }
  }
}

void ThreadsDoNotChangeResults() {
  const std::vector<int64_t> bin_sizes = {50, 500, 0};
  Tensors gradients;
  Tensors start;
  std::vector<DecoderTensor> tensors;
  for (uint32_t i = 0; i < bin_sizes.size(); ++i) {
    gradients.push_back(Normal(1500007, 0.3f, i));
    start.push_back(Normal(1500007, 1, 10 + i));
    tensors.push_back({1500007, bin_sizes[i]});
  }
  Tensors expected = start;
  const auto payload = Encode<float>(&expected, gradients, bin_sizes);
  Tensors sums = Zeros(tensors);
  for (int64_t threads : {1, 2, 3, 16}) {
    EncodeSettings settings;
    settings.parallel_for = Threads(threads);
    Tensors residuals = start;
    CHECK(Encode<float>(&residuals, gradients, bin_sizes, settings) == payload);
    Tensors replacing = start;
    CHECK(EncodeReplacing(&replacing, gradients, bin_sizes, settings) == payload);
    AdaCompDecoder decoder(tensors, kFingerprint, Threads(threads));
    CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
    Tensors outputs = Zeros(tensors);
    CHECK(decoder.Reduce(Pointers(&outputs)));
    for (size_t i = 0; i < bin_sizes.size(); ++i) {
      CHECK(SameBits(residuals[i], expected[i]));
      CHECK(SameBits(replacing[i], expected[i]));
      if (threads == 1) sums[i] = outputs[i];
      CHECK(SameBits(outputs[i], sums[i]));
    }
  }
}

void ANonFiniteGradientLeavesTheResidualsAsTheyWere() {
  const std::vector<int64_t> bin_sizes = {50, 500, 0, 50};
  for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Tensors gradients;
    Tensors before;
    for (uint32_t i = 0; i < bin_sizes.size(); ++i) {
      gradients.push_back(Normal(1200000, 0.3f, i));
      before.push_back(Normal(1200000, 1, 10 + i));
    }
    gradients[3][700000] = bad;
    Tensors residuals = before;
    const auto payload = Encode<float>(&residuals, gradients, bin_sizes);
    CHECK(static_cast<int64_t>(payload.size()) == kHeaderWords);
    CHECK(EncodeReplacing(&residuals, gradients, bin_sizes) == payload);
    for (size_t i = 0; i < bin_sizes.size(); ++i) {
      CHECK(SameBits(residuals[i], before[i]));
    }
  }
}

// All gradients are finite, but a sum is not.
void AnOverflowingSumLeavesTheResidualsAsTheyWere() {
  const Tensors before = {Normal(30001, 1, 1), Normal(5000, 1, 2), {1, 2, 3e38f, 3e38f}};
  Tensors residuals = before;
  const Tensors gradients = {Normal(30001, 0.3f, 3), Normal(5000, 0.3f, 4), {0.5f, 1, 3e38f, 0}};
  const auto payload = Encode<float>(&residuals, gradients, {50, 0, 2});
  CHECK(static_cast<int64_t>(payload.size()) == kHeaderWords);
  CHECK(EncodeReplacing(&residuals, gradients, {50, 0, 2}) == payload);
  for (size_t i = 0; i < before.size(); ++i) CHECK(SameBits(residuals[i], before[i]));
}

constexpr AdamSettings kAdam{0.999f, 1e-7f, 300.0f};

template <typename Gradient>
std::vector<float> Divided(GradientType type, const std::vector<Gradient>& gradient,
                           const AdamSettings& adam, std::vector<float>* moment) {
  std::vector<float> divided(gradient.size());
  const int64_t size = gradient.size();
  Precondition({{moment->data(), gradient.data(), type, size, divided.data(), nullptr, adam}},
               Threads(1));
  return divided;
}

template <typename Gradient>
void CheckDivides(GradientType type, const std::vector<Gradient>& gradient,
                  const AdamSettings& adam = kAdam) {
  const int64_t size = gradient.size();
  const std::vector<float> start(size, 0.01f);
  std::vector<float> moment = start;
  const std::vector<float> divided = Divided(type, gradient, adam, &moment);
  for (int64_t bin_size : kBinSizes) {
    Tensors expected = {Normal(size, 1, 1)};
    const auto payload = Encode<float>(&expected, {divided}, {bin_size});
    for (Simd simd : {Simd::kPortable, Simd::kAvx2, Simd::kAvx512}) {
      if (!IsSupported(simd)) continue;
      Tensors residuals = {Normal(size, 1, 1)};
      Tensors moments = {start};
      const EncodeSettings settings = {2, Threads(simd == Simd::kAvx2 ? 3 : 1), simd, type, adam};
      CHECK(Encode<Gradient>(&residuals, {gradient}, {bin_size}, settings, &moments) == payload);
      CHECK(SameBits(residuals[0], expected[0]));
      CHECK(SameBits(moments[0], moment));
    }
  }
}

void DividesAsThePreconditionerDoes() {
  for (int64_t size : kSizes) {
    CheckDivides(GradientType::kFloat, Normal(size, 0.3f, 2));
    CheckDivides(GradientType::kHalf, Halves(size, 3));
    CheckDivides(GradientType::kBFloat16, BrainFloats(size, 0.3f, 4));
    CheckDivides(GradientType::kFloat, Normal(size, 0.3f, 2), {0.999f, 1e-30f, 300.0f});
  }
}

void ANonFiniteGradientLeavesSecondMomentsAsTheyWere() {
  const std::vector<int64_t> sizes = {1200000, 30001, 1200000, 5};
  const std::vector<int64_t> bin_sizes = {50, 0, 500, 16383};
  for (int64_t place : {int64_t{0}, int64_t{700000}, sizes[2] - 1}) {
    Tensors gradients, residuals, moments;
    for (uint32_t i = 0; i < sizes.size(); ++i) {
      gradients.push_back(Normal(sizes[i], 0.3f, i));
      residuals.push_back(Normal(sizes[i], 1, 10 + i));
      moments.emplace_back(sizes[i], 0.01f);
    }
    const Tensors before = residuals;
    const Tensors moments_before = moments;
    gradients[2][place] = std::nanf("");
    const EncodeSettings settings = {2, Threads(2), BestSimd(), GradientType::kFloat, kAdam};
    const auto payload = Encode<float>(&residuals, gradients, bin_sizes, settings, &moments);
    CHECK(static_cast<int64_t>(payload.size()) == kHeaderWords);
    for (size_t i = 0; i < sizes.size(); ++i) {
      CHECK(SameBits(residuals[i], before[i]));
      CHECK(SameBits(moments[i], moments_before[i]));
    }
  }
}

// The quotients are finite; only the sum with the residual overflows.
void AnOverflowingQuotientLeavesEverythingAsItWas() {
  const AdamSettings adam{1.0f, 1e-38f, 1.0f};
  Tensors residuals = {Normal(3000, 1, 1), {1, 3e38f, 2}};
  Tensors moments = {std::vector<float>(3000, 0.01f), {0, 0, 0}};
  const auto before = residuals, moments_before = moments;
  const Tensors gradients = {Normal(3000, 0.3f, 2), {0, 2, 0}};
  const EncodeSettings settings = {2, Threads(2), BestSimd(), GradientType::kFloat, adam};
  const auto payload = Encode<float>(&residuals, gradients, {50, 2}, settings, &moments);
  CHECK(static_cast<int64_t>(payload.size()) == kHeaderWords);
  for (size_t i = 0; i < before.size(); ++i) {
    CHECK(SameBits(residuals[i], before[i]));
    CHECK(SameBits(moments[i], moments_before[i]));
  }
}

// No step leaves such state behind, but a program may assign it.
void StateThatIsNotFiniteIsReported() {
  const std::vector<int64_t> bin_sizes = {50, 500, 0};
  for (size_t bad : {0, 1, 2}) {
    for (bool in_moment : {false, true}) {
      Tensors gradients, residuals, moments;
      for (uint32_t i = 0; i < bin_sizes.size(); ++i) {
        gradients.push_back(Normal(30001, 0.3f, i));
        residuals.push_back(Normal(30001, 1, 10 + i));
        moments.emplace_back(30001, 0.01f);
      }
      (in_moment ? moments : residuals)[bad][7000] = std::nanf("");
      const Tensors before = residuals;
      const EncodeSettings settings = {2, Threads(2), BestSimd(), GradientType::kFloat, kAdam};
      const auto payload = Encode<float>(&residuals, gradients, bin_sizes, settings, &moments);
      CHECK(static_cast<int64_t>(payload.size()) == kHeaderWords);
      for (size_t i = 0; i < residuals.size(); ++i) {
        for (size_t j = 0; j < residuals[i].size(); ++j) {
          if (i == bad && j == 7000) continue;
          CHECK(std::fabs(residuals[i][j] - before[i][j]) < 1e-5f);
          CHECK(moments[i][j] <= 0.01f && moments[i][j] > 0.0099999f);
        }
      }
    }
  }
}

// As in a caller that cannot write the payload.
void RollbackGivesSecondMomentsBack() {
  std::vector<float> residual = Normal(100001, 1, 1);
  std::vector<float> moment(residual.size(), 0.01f);
  const std::vector<float> gradient = Normal(residual.size(), 0.3f, 2);
  const std::vector<float> before = residual;
  AdaCompEncoder encoder({{residual.data(), gradient.data(), GradientType::kFloat, 100001, 500,
                           moment.data(), nullptr, kAdam}},
                         2, Threads(2));
  CHECK(encoder.Run());
  encoder.Rollback();
  for (size_t i = 0; i < residual.size(); ++i) {
    CHECK(std::fabs(residual[i] - before[i]) < 1e-5f);
    CHECK(moment[i] <= 0.01f && moment[i] > 0.0099999f);
  }
}

// As in a caller that cannot write the payload. The second tensor replaces its gradient.
void RollbackDoesNotReadReplacedGradients() {
  const std::vector<float> before = Normal(100001, 1, 1);
  std::vector<float> in_place = before, residual = before;
  std::vector<float> gradient = Normal(before.size(), 0.3f, 2);
  const std::vector<float> given = gradient;
  EncoderTensor replacing = {residual.data(), gradient.data(), GradientType::kFloat, 100001, 500};
  replacing.replaced_gradient = gradient.data();
  AdaCompEncoder encoder({{in_place.data(), given.data(), GradientType::kFloat, 100001, 500},
                          replacing},
                         2, Threads(2));
  CHECK(encoder.Run());
  CHECK(SameBits(gradient, in_place));
  encoder.Rollback();
  CHECK(SameBits(residual, before));
  for (size_t i = 0; i < before.size(); ++i) CHECK(std::fabs(in_place[i] - before[i]) < 1e-5f);
}

void WhatWasPackedCanBePutBack() {
  Tensors residuals = {Normal(5000, 1, 1), Normal(70, 1, 2)};
  Tensors sums = residuals;
  const Tensors gradients = {Normal(5000, 0.3f, 3), Normal(70, 1, 4)};
  const auto payload = Encode<float>(&residuals, gradients, {50, 0});
  AdaCompDecoder decoder({{5000, 50}, {70, 0}}, kFingerprint, Threads(2));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), std::nullopt).ok());
  decoder.AddTo(Pointers(&residuals));
  for (size_t i = 0; i < sums.size(); ++i) {
    for (size_t j = 0; j < sums[i].size(); ++j) {
      CHECK(std::fabs(residuals[i][j] - (sums[i][j] + gradients[i][j])) < 4e-6f);
    }
  }
}

// Reads one code after the other, as docs/payload_format.md describes them.
std::vector<float> AddedOneByOne(const std::vector<uint8_t>& codes, int64_t bin_size, float scale,
                                 std::vector<float> values) {
  int64_t begin = 0;
  for (uint8_t code : codes) {
    if (code >> 2 != 63) values[begin + (code >> 2)] += code & 2 ? -scale : scale;
    if (code & 1) begin += bin_size;
  }
  return values;
}

void CodesAreAddedInEightsAsOneByOne() {
  std::mt19937 engine(7);
  for (int64_t bin_size : {1, 2, 7, 50, 63}) {
    for (unsigned sent_of_hundred : {3, 30, 100}) {
      const int64_t num_bins = 300;
      std::vector<uint8_t> codes;
      for (int64_t bin = 0; bin < num_bins; ++bin) {
        const size_t before = codes.size();
        for (int64_t i = 0; i < bin_size; ++i) {
          if (engine() % 100 < sent_of_hundred) codes.push_back(i << 2 | (engine() & 2));
        }
        if (codes.size() == before) codes.push_back(63 << 2);
        codes.back() |= 1;
      }
      const std::vector<float> values = Normal(num_bins * bin_size, 1, 8);
      std::vector<float> added = values;
      AddCodes(codes.data(), num_bins, bin_size, 0.3f, added.data());
      CHECK(SameBits(added, AddedOneByOne(codes, bin_size, 0.3f, values)));
    }
  }
}

// Sums that are written past the caches, from places that are no multiples of a vector.
void LargeSumsAreThoseOfEachBlock() {
  const int64_t size = kBeyondCaches + 77;
  Tensors residuals = {std::vector<float>(size), Normal(1001, 1, 2)};
  Tensors gradients = residuals;
  for (int64_t i = 0; i < size; i += 3) gradients[0][i] = static_cast<float>(i % 1000 - 500);
  const auto payload = Encode<float>(&residuals, gradients, {7, 0});
  AdaCompDecoder decoder({{size, 7}, {1001, 0}}, kFingerprint, Threads(2));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  Tensors sums = {std::vector<float>(size, 1), std::vector<float>(1001, 1)};
  CHECK(decoder.Reduce(Pointers(&sums)));
  Tensors added = {std::vector<float>(size), std::vector<float>(1001)};
  decoder.AddTo(Pointers(&added));
  CHECK(SameBits(sums[0], added[0]) && SameBits(sums[1], added[1]));
}

void EveryBitFlipIsAnError() {
  Tensors residuals = {Normal(300, 1, 1), Normal(5, 1, 2)};
  auto payload = Encode<float>(&residuals, Tensors(residuals), {50, 0});
  AdaCompDecoder decoder({{300, 50}, {5, 0}}, kFingerprint, Threads(1));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  for (size_t word = 0; word < payload.size(); ++word) {
    for (int bit = 0; bit < 32; ++bit) {
      payload[word] ^= 1u << bit;
      const Status status = decoder.Read(payload.data(), 1, payload.size(), kStep);
      CHECK(!status.ok());
      CHECK(status.message.find("payload of replica 0: ") == 0);
      payload[word] ^= 1u << bit;
    }
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(AllInstructionSetsGiveTheSameBits);
  RUN(ZerosDenormalsAndTiesAreTheSameInAllInstructionSets);
  RUN(SignsOfZerosAreThoseOfSums);
  RUN(ThreadsDoNotChangeResults);
  RUN(ANonFiniteGradientLeavesTheResidualsAsTheyWere);
  RUN(AnOverflowingSumLeavesTheResidualsAsTheyWere);
  RUN(DividesAsThePreconditionerDoes);
  RUN(ANonFiniteGradientLeavesSecondMomentsAsTheyWere);
  RUN(AnOverflowingQuotientLeavesEverythingAsItWas);
  RUN(StateThatIsNotFiniteIsReported);
  RUN(RollbackGivesSecondMomentsBack);
  RUN(RollbackDoesNotReadReplacedGradients);
  RUN(WhatWasPackedCanBePutBack);
  RUN(CodesAreAddedInEightsAsOneByOne);
  RUN(LargeSumsAreThoseOfEachBlock);
  RUN(EveryBitFlipIsAnError);
}
