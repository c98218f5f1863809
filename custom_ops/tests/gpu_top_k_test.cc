// Compares top-k's GPU kernels, in the emulator, with its CPU kernels.
#include "gpu_emulator.h"

#include "../gpu/top_k.cu"

#include "../gpu/top_k_on_gpu.h"
#include "../kernels/top_k_codec.h"
#include "gpu_fixed_support.h"

namespace gradcomp {
namespace {

const FixedMethod kTopK = {
    Method::kTopK, {GRADCOMP_TOP_K_KERNELS(EMULATED)}, EncodeTopKOnGpu, DecodeTopKOnGpu};

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

void EncodesAsTheCpuDoes() { CheckEncodesAllTypes(kTopK, NewCodecs(kSent)); }

void OfEqualMagnitudesTheFirstAreSent() {
  for (uint32_t kinds : {1, 2, 5}) {
    for (int64_t entries : {1, 700, 4096, 8500, 9000}) {
      std::mt19937 engine(kinds);
      std::vector<float> values(9000);
      for (float& value : values) value = (engine() % 2 ? 1.0f : -1.0f) * (engine() % kinds);
      CheckEncodes(kTopK, NewCodecs({{9000, entries}}), {std::vector<float>(9000, -0.0f)}, {values});
    }
  }
}

void MagnitudesThatDifferInAnyDigitAreTold() {
  for (int bit = 0; bit < 30; ++bit) {
    std::vector<float> values(600);
    for (uint32_t i = 0; i < values.size(); ++i) values[i] = FromBits(0x3f800000u ^ (i % 3) << bit);
    for (float& value : values) value = std::isfinite(value) ? value : 1e-40f;
    CheckEncodes(kTopK, NewCodecs({{600, 250}}), {std::vector<float>(600)}, {values});
  }
}

// A tensor with more slices than a block has threads.
void LargeTensorsAreCutIntoManySlices() {
  const int64_t size = 4096 * 513 + 7;
  std::vector<float> values(size);
  for (int64_t i = 0; i < size; i += 4000) values[i] = 1 + i % 7;
  CheckEncodes(kTopK, NewCodecs({{size, 100}}), {std::vector<float>(size)}, {values},
               GradientType::kFloat, {1});
}

void ANonFiniteSumLeavesEverythingAsItIs() {
  CheckANonFiniteSumLeavesEverything(kTopK, NewCodecs(kSent), {0, 3, 7});
}

// Also tests more payloads than are searched in parallel.
void DecodesAsTheCpuDoes() { CheckDecodes(kTopK, NewCodecs(kSent), {1, 3, 300}); }

void ANonFinitePayloadPutsNothingBack() {
  CheckANonFinitePayloadPutsNothingBack(kTopK, NewCodecs(kSent));
}

void SumsThatMayOverflowAreNotCalledFinite() {
  CheckMayOverflow(kTopK, NewCodecs(kSent), 2, 3e38f);
}

void OfNoElementsThereIsNothingToDo() {
  CheckOfNoElementsThereIsNothingToDo(kTopK, NewCodecs({{0, 0}}));
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
  RUN(ANonFinitePayloadPutsNothingBack);
  RUN(SumsThatMayOverflowAreNotCalledFinite);
  RUN(OfNoElementsThereIsNothingToDo);
}
