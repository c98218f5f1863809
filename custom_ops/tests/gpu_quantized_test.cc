// Compares the GPU kernels of QSGD and SignSGD, in the emulator, with the CPU kernels.
#include "gpu_emulator.h"

#include "../gpu/qsgd.cu"
#include "../gpu/sign_sgd.cu"

#include "../gpu/qsgd_on_gpu.h"
#include "../gpu/sign_sgd_on_gpu.h"
#include "../kernels/qsgd_codec.h"
#include "../kernels/sign_sgd_codec.h"
#include "gpu_fixed_support.h"

namespace gradcomp {
namespace {

const FixedMethod kQsgd = {
    Method::kQsgd, {GRADCOMP_QSGD_KERNELS(EMULATED)}, EncodeQsgdOnGpu, DecodeQsgdOnGpu};
const FixedMethod kSignSgd = {Method::kSignSgd,
                              {GRADCOMP_SIGN_SGD_KERNELS(EMULATED)},
                              EncodeSignSgdOnGpu,
                              DecodeSignSgdOnGpu};

constexpr int64_t kLargest = 70001;  // larger than a bucket, a slice and a block of SignSGD

// All numbers of bits, whole tensors and empty tensors; the first tensor is quantized.
Codecs QsgdCodecs(int64_t bucket_size) {
  Codecs codecs;
  int bits = kMinQsgdBits;
  for (int64_t size : {9001, 1, 0, 4096, 8193, 33, int{kLargest}, 0, 1024}) {
    codecs.push_back(std::make_unique<QsgdCodec>(size, QsgdSettings{bits, bucket_size}));
    bits = bits == kMaxQsgdBits ? kMinQsgdBits : bits + 1;
    if (size == 33) codecs.push_back(std::make_unique<WholeCodec>(5000));
  }
  codecs.push_back(std::make_unique<WholeCodec>(0));
  return codecs;
}

Codecs SignSgdCodecs() {
  Codecs codecs;
  for (int64_t size : {9001, 1, 0, 4096, 33, int{kLargest}, 1 << 17, 0}) {
    codecs.push_back(std::make_unique<SignSgdCodec>(size));
  }
  return codecs;
}

// Buckets that warps and blocks measure, in whole and partial slices.
void QsgdEncodesAsTheCpuDoes() {
  for (int64_t bucket_size : {32, 96, 1024, 4096, 4128, 65536}) {
    const Codecs codecs = QsgdCodecs(bucket_size);
    CheckEncodes(kQsgd, codecs, NormalTensors(codecs, 1, 1), NormalTensors(codecs, 0.3f, 50));
  }
  CheckEncodesAllTypes(kQsgd, QsgdCodecs(256));
}

void QsgdsExtremesAreAsOnTheCpu() {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  const Tensors extremes = {
      {kMost, -kMost, 0, 1e38f}, {kMost, kMost}, {kMost, std::nextafter(kMost, 0.0f)},
      {kLeast, -kLeast},         {kLeast, 0},    {-0.0f, -0.0f},
      {0.0f, -0.0f},             {-3, -3, -3},   {1, 1 + 0x1p-23f}};
  for (int bits : {2, 3, 8}) {
    Codecs codecs;
    Tensors residuals;
    for (const auto& values : extremes) {
      codecs.push_back(std::make_unique<QsgdCodec>(values.size(), QsgdSettings{bits, 32}));
      residuals.emplace_back(values.size(), -0.0f);
    }
    CheckEncodes(kQsgd, codecs, residuals, extremes);
  }
}

void SignSgdEncodesAsTheCpuDoes() { CheckEncodesAllTypes(kSignSgd, SignSgdCodecs()); }

// In this order, the sum is a tie between two floats. In another order, the small numbers may sum
// to a number that is not lost in the addition to the first, and the sum is above the tie.
const std::vector<float> kTie = {1, 0x1p-24f, 0x1p-54f, 0x1p-54f, 0x1p-54f, 0x1p-54f, 0, 0};

void SignSgdAddsUpInTheOrderOfTheCpu() {
  for (size_t step : {1, gpu::kSignSgdLanes}) {  // over the lanes, and within a lane
    std::vector<float> values(kTie.size() * step);
    for (size_t i = 0; i < kTie.size(); ++i) values[i * step] = kTie[i];
    Codecs codecs;
    codecs.push_back(std::make_unique<SignSgdCodec>(values.size()));
    CheckEncodes(kSignSgd, codecs, {std::vector<float>(values.size())}, {values});
  }
}

void SignsOfZerosAndDenormalsAreAsOnTheCpu() {
  Codecs codecs;
  codecs.push_back(std::make_unique<SignSgdCodec>(5));
  const std::vector<float> values = {0.0f, -0.0f, -1e-45f, 1e-45f, -1e-40f};
  CheckEncodes(kSignSgd, codecs, {std::vector<float>(5, -0.0f)}, {values});
  CheckEncodes(kSignSgd, codecs, {std::vector<float>(5)}, {std::vector<float>(5)});
}

// A tensor with more blocks than a CUDA block has threads.
void SumsOfManyBlocksAreAddedInTheirOrder() {
  constexpr int64_t kNumBlocks = 1024;
  std::vector<double> sums(kNumBlocks);
  for (size_t i = 0; i < kTie.size(); ++i) sums[i * 100] = kTie[i];
  sums.back() = 0x1p-22;  // the sum stays a tie
  gpu::SignSgdTensor tensor = {};
  tensor.size = kNumBlocks * gpu::kSignSgdBlock;
  tensor.num_blocks = kNumBlocks;
  float mean = 0;
  int not_finite = 0;
  gpu::SignSgdEncodeStep step = {};
  step.tensors = &tensor;
  step.num_tensors = 1;
  step.block_sums = sums.data();
  step.means = &mean;
  step.not_finite = &not_finite;
  EmulatedQueue queue(kSignSgd.kernels, 1);
  queue.Launch("gradcomp_sign_sgd_mean", 1, &step);
  CHECK(mean == (1 + 0x1p-22f) / static_cast<float>(tensor.size));
  CHECK(!not_finite);
}

void ANonFiniteSumLeavesEverythingAsItIs() {
  CheckANonFiniteSumLeavesEverything(kQsgd, QsgdCodecs(1024), {0, 1, 6, 7});
  CheckANonFiniteSumLeavesEverything(kQsgd, QsgdCodecs(65536), {7});
  CheckANonFiniteSumLeavesEverything(kSignSgd, SignSgdCodecs(), {0, 1, 5});
}

void DecodesAsTheCpuDoes() {
  for (int64_t bucket_size : {32, 96, 65536}) CheckDecodes(kQsgd, QsgdCodecs(bucket_size));
  CheckDecodes(kSignSgd, SignSgdCodecs());
}

void ANonFinitePayloadPutsNothingBack() {
  CheckANonFinitePayloadPutsNothingBack(kQsgd, QsgdCodecs(1024));
  CheckANonFinitePayloadPutsNothingBack(kSignSgd, SignSgdCodecs());
}

void SumsThatMayOverflowAreNotCalledFinite() {
  CheckMayOverflow(kQsgd, QsgdCodecs(1024), 3, 3e38f);
  CheckMayOverflow(kQsgd, QsgdCodecs(1024), 3, -3e38f);
  Codecs codecs;
  codecs.push_back(std::make_unique<SignSgdCodec>(6));
  CheckMayOverflow(kSignSgd, codecs, 4, 3e38f);
}

void OfNoElementsThereIsNothingToDo() {
  for (const FixedMethod& method : {kQsgd, kSignSgd}) {
    Codecs codecs;
    if (method.method == Method::kQsgd) {
      codecs.push_back(std::make_unique<QsgdCodec>(0, QsgdSettings{4, 1024}));
    } else {
      codecs.push_back(std::make_unique<SignSgdCodec>(0));
    }
    CheckOfNoElementsThereIsNothingToDo(method, codecs);
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(QsgdEncodesAsTheCpuDoes);
  RUN(QsgdsExtremesAreAsOnTheCpu);
  RUN(SignSgdEncodesAsTheCpuDoes);
  RUN(SignSgdAddsUpInTheOrderOfTheCpu);
  RUN(SignsOfZerosAndDenormalsAreAsOnTheCpu);
  RUN(SumsOfManyBlocksAreAddedInTheirOrder);
  RUN(ANonFiniteSumLeavesEverythingAsItIs);
  RUN(DecodesAsTheCpuDoes);
  RUN(ANonFinitePayloadPutsNothingBack);
  RUN(SumsThatMayOverflowAreNotCalledFinite);
  RUN(OfNoElementsThereIsNothingToDo);
}
