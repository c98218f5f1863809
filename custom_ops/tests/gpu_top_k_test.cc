// Top-k's kernels for GPUs in the emulator, beside those for CPUs.
#include "gpu_emulator.h"

#include "../gpu/top_k.cu"

#include <algorithm>
#include <limits>

#include "../gpu/top_k_on_gpu.h"
#include "../kernels/top_k_codec.h"
#include "../kernels/whole_codec.h"
#include "check.h"
#include "emulated_queue.h"
#include "fixed_length_support.h"

namespace gradcomp {
namespace {

using Tensors = std::vector<std::vector<float>>;

const EmulatedKernels kKernels = {GRADCOMP_TOP_K_KERNELS(EMULATED)};

struct Sent {
  int64_t size;
  int64_t entries;  // 0: sent whole
};
const std::vector<Sent> kSent = {{9001, 90}, {1, 1}, {0, 0}, {777, 0}, {5000, 5000}, {4097, 1},
                                 {0, 0},     {4096, 2000}};

Codecs NewCodecs(const std::vector<Sent>& sent) {
  Codecs codecs;
  for (const Sent& one : sent) {
    if (one.entries == 0) {
      codecs.push_back(std::make_unique<WholeCodec>(one.size));
    } else {
      codecs.push_back(std::make_unique<TopKCodec>(one.size, one.entries));
    }
  }
  return codecs;
}

struct Inputs {
  Tensors residuals;
  std::vector<std::vector<uint32_t>> gradients;  // bytes of any type

  std::vector<Source> Sources(GradientType type) {
    std::vector<Source> sources;
    for (size_t i = 0; i < residuals.size(); ++i) {
      sources.push_back({residuals[i].data(), gradients[i].data(), type});
    }
    return sources;
  }
};

Inputs InputsOf(const Tensors& residuals, const Tensors& gradients, GradientType type) {
  Inputs inputs{residuals, {}};
  for (const auto& gradient : gradients) {
    inputs.gradients.emplace_back(gradient.size());
    auto* halves = reinterpret_cast<uint16_t*>(inputs.gradients.back().data());
    for (size_t i = 0; i < gradient.size(); ++i) {
      const uint32_t bits = ToBits(gradient[i]);
      if (type == GradientType::kFloat) {
        inputs.gradients.back()[i] = bits;
      } else {
        std::memcpy(reinterpret_cast<char*>(halves) + 2 * i, reinterpret_cast<const char*>(&bits) + 2,
                    2);
      }
    }
  }
  return inputs;
}

void CheckEqual(const std::vector<Sent>& sent, const Tensors& residuals, const Tensors& gradients,
                GradientType type = GradientType::kFloat,
                const std::vector<unsigned>& seeds = {1, 50}) {
  const Codecs codecs = NewCodecs(sent);
  Inputs expected = InputsOf(residuals, gradients, type);
  std::vector<int32_t> payload(PayloadWords(codecs));
  EncodeFixedLength(codecs, expected.Sources(type), {Method::kTopK, kFingerprint, kPlan, kStep, 0},
                    Threads(1), payload.data());
  std::vector<PayloadView> views;
  CHECK(ReadRows(payload.data(), 1, payload.size(), &views).ok());
  const PayloadView& view = views[0];
  for (unsigned seed : seeds) {
    Inputs inputs = InputsOf(residuals, gradients, type);
    EmulatedQueue queue(kKernels, seed);
    const EncodedFixedOnGpu encoded = EncodeTopKOnGpu(codecs, inputs.Sources(type), &queue);
    CHECK(*encoded.not_finite == view.header.non_finite());
    CHECK(std::equal(encoded.body, encoded.body + view.body_words(), view.body()));
    for (size_t i = 0; i < sent.size(); ++i) {
      CHECK(SameBits(inputs.residuals[i], expected.residuals[i]));
    }
  }
}

Tensors Draw(uint32_t seed, float deviation) {
  Tensors tensors;
  for (const Sent& one : kSent) tensors.push_back(Normal(one.size, deviation, seed++));
  return tensors;
}

void EncodesAsTheCpuDoes() {
  CheckEqual(kSent, Draw(1, 1), Draw(20, 0.3f));
  CheckEqual(kSent, Draw(2, 1), Draw(30, 0.3f), GradientType::kHalf);
  CheckEqual(kSent, Draw(3, 1), Draw(40, 0.3f), GradientType::kBFloat16);
}

void OfEqualMagnitudesTheFirstAreSent() {
  for (uint32_t kinds : {1, 2, 5}) {
    for (int64_t entries : {1, 700, 4096, 8500, 9000}) {
      std::mt19937 engine(kinds);
      std::vector<float> values(9000);
      for (float& value : values) value = (engine() % 2 ? 1.0f : -1.0f) * (engine() % kinds);
      CheckEqual({{9000, entries}}, {std::vector<float>(9000, -0.0f)}, {values});
    }
  }
}

void MagnitudesThatDifferInAnyDigitAreTold() {
  for (int bit = 0; bit < 30; ++bit) {
    std::vector<float> values(600);
    for (uint32_t i = 0; i < values.size(); ++i) values[i] = FromBits(0x3f800000u ^ (i % 3) << bit);
    for (float& value : values) value = std::isfinite(value) ? value : 1e-40f;
    CheckEqual({{600, 250}}, {std::vector<float>(600)}, {values});
  }
}

// More slices of a tensor than a block has threads.
void LargeTensorsAreCutIntoManySlices() {
  const int64_t size = 4096 * 513 + 7;
  std::vector<float> values(size);
  for (int64_t i = 0; i < size; i += 4000) values[i] = 1 + i % 7;
  CheckEqual({{size, 100}}, {std::vector<float>(size)}, {values}, GradientType::kFloat, {1});
}

void ANonFiniteSumLeavesEverythingAsItIs() {
  for (size_t bad : {0, 3, 7}) {
    for (float value : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
      Tensors gradients = Draw(20, 0.3f);
      gradients[bad].back() = value;
      CheckEqual(kSent, Draw(1, 1), gradients);
    }
  }
}

struct Received {
  Codecs codecs = NewCodecs(kSent);
  std::vector<int32_t> rows;
};

Received Receive(int64_t num_payloads, float largest = 1) {
  Received received;
  for (int64_t i = 0; i < num_payloads; ++i) {
    Tensors residuals = Draw(100 * i, 1);
    residuals[0][5] = largest;
    const auto payload = EncodeFixed(Method::kTopK, received.codecs, &residuals,
                                     Draw(100 * i + 50, 0.3f), Threads(1));
    received.rows.insert(received.rows.end(), payload.begin(), payload.end());
  }
  return received;
}

void DecodesAsTheCpuDoes() {
  for (int64_t num_payloads : {1, 3}) {
    const Received received = Receive(num_payloads);
    FixedLengthDecoder decoder(received.codecs, Method::kTopK, kFingerprint, kPlan, Threads(1));
    const int64_t words = received.rows.size() / num_payloads;
    CHECK(decoder.Read(received.rows.data(), num_payloads, words, kStep).ok());
    CHECK(decoder.ReducesToFinite());
    Tensors sums = Draw(7, 1);
    Tensors added = sums;
    Tensors gpu_sums = sums;
    Tensors gpu_added = sums;
    CHECK(decoder.Reduce(Pointers(&sums)));
    decoder.AddTo(Pointers(&added));
    EmulatedQueue queue(kKernels, 3);
    ReduceTopKOnGpu(received.codecs, decoder, Pointers(&gpu_sums), &queue);
    AddTopKOnGpu(received.codecs, decoder, Pointers(&gpu_added), &queue);
    for (size_t i = 0; i < sums.size(); ++i) {
      CHECK(SameBits(gpu_sums[i], sums[i]));
      CHECK(SameBits(gpu_added[i], added[i]));
    }
  }
}

void SumsThatMayOverflowAreNotCalledFinite() {
  const Received received = Receive(2, 3e38f);
  FixedLengthDecoder decoder(received.codecs, Method::kTopK, kFingerprint, kPlan, Threads(1));
  CHECK(decoder.Read(received.rows.data(), 2, received.rows.size() / 2, kStep).ok());
  CHECK(!decoder.ReducesToFinite());
}

void OfNoElementsThereIsNothingToDo() {
  const Codecs codecs = NewCodecs({{0, 0}});
  Inputs inputs = InputsOf({{}}, {{}}, GradientType::kFloat);
  EmulatedQueue queue(kKernels, 1);
  CHECK(EncodeTopKOnGpu(codecs, inputs.Sources(GradientType::kFloat), &queue).body == nullptr);
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(EncodesAsTheCpuDoes);
  RUN(OfEqualMagnitudesTheFirstAreSent);
  RUN(MagnitudesThatDifferInAnyDigitAreTold);
  RUN(LargeTensorsAreCutIntoManySlices);
  RUN(ANonFiniteSumLeavesEverythingAsItIs);
  RUN(DecodesAsTheCpuDoes);
  RUN(SumsThatMayOverflowAreNotCalledFinite);
  RUN(OfNoElementsThereIsNothingToDo);
}
