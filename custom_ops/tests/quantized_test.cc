// Tests the kernels of QSGD and SignSGD under sanitizers. tests/compressors compares their results
// with NumPy's.
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "../kernels/pack_bits.h"
#include "../kernels/qsgd_codec.h"
#include "../kernels/sign_sgd_codec.h"
#include "../kernels/whole_codec.h"
#include "check.h"
#include "fixed_length_support.h"

namespace gradcomp {
namespace {

constexpr Method kMethod = Method::kQsgd;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Tensors of each kind, with whole and partial blocks, and empty tensors.
Codecs AllKinds() {
  Codecs codecs;
  for (int64_t size : {200003, 65536, 1025, 33, 1, 0}) {
    codecs.push_back(std::make_unique<SignSgdCodec>(size));
    codecs.push_back(std::make_unique<WholeCodec>(size));
    for (int bits = kMinQsgdBits; bits <= kMaxQsgdBits; ++bits) {
      const int64_t bucket_size = bits % 2 == 0 ? 1024 : 96 * bits;
      const QsgdSettings settings = {bits, bucket_size};
      codecs.push_back(std::make_unique<QsgdCodec>(size, settings));
    }
  }
  return codecs;
}

void CodesComeOutAsTheyWentIn() {
  std::mt19937 engine(1);
  for (int bits = 1; bits <= kMaxCodeBits; ++bits) {
    for (int64_t num_codes : {1, 2, 7, 8, 9, 31, 32, 33, 1023, 1024}) {
      std::vector<uint8_t> codes(num_codes);
      for (uint8_t& code : codes) code = engine() >> (32 - bits);
      CodeChunk chunk;
      std::copy(codes.begin(), codes.end(), chunk.codes());
      std::vector<int32_t> words(PackedWords(num_codes, bits), -1);
      chunk.Pack(num_codes, bits, words.data());
      CHECK(CheckPadding(words.data(), num_codes, bits).ok());
      for (int64_t i = 0; i < num_codes * bits; ++i) {  // bit by bit, as in the format
        CHECK((words[i / 32] >> i % 32 & 1) == (codes[i / bits] >> i % bits & 1));
      }
      chunk.Unpack(words.data(), num_codes, bits);
      CHECK(std::equal(codes.begin(), codes.end(), chunk.codes()));
      if (num_codes * bits % 32 == 0) continue;
      words.back() |= static_cast<int32_t>(kSignBit);
      CHECK(!CheckPadding(words.data(), num_codes, bits).ok());
    }
  }
}

void ThreadsDoNotChangeResults() {
  const Codecs codecs = AllKinds();
  const Tensors gradients = NormalTensors(codecs, 0.3f, 100);
  Tensors expected = NormalTensors(codecs, 1, 1);
  const auto payload = EncodeFixed(kMethod, codecs, &expected, gradients, Threads(1));
  Tensors sums;
  for (int64_t threads : {1, 2, 3, 16}) {
    Tensors residuals = NormalTensors(codecs, 1, 1);
    CHECK(EncodeFixed(kMethod, codecs, &residuals, gradients, Threads(threads)) == payload);
    FixedLengthDecoder decoder(codecs, kMethod, kFingerprint, kPlan, Threads(threads));
    CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
    Tensors outputs = NormalTensors(codecs, 1, 9);
    CHECK(decoder.Reduce(Pointers(&outputs)));
    if (threads == 1) sums = outputs;
    for (size_t i = 0; i < codecs.size(); ++i) {
      CHECK(SameBits(residuals[i], expected[i]));
      CHECK(SameBits(outputs[i], sums[i]));
    }
  }
}

void WhatIsSentAndKeptIsWhatWasThereAndCanBePutBack() {
  const Codecs codecs = AllKinds();
  const Tensors gradients = NormalTensors(codecs, 0.3f, 100);
  Tensors sums = NormalTensors(codecs, 1, 1);
  Tensors residuals = sums;
  const auto payload = EncodeFixed(kMethod, codecs, &residuals, gradients, Threads(2));
  FixedLengthDecoder decoder(codecs, kMethod, kFingerprint, kPlan, Threads(2));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), std::nullopt).ok());
  decoder.AddTo(Pointers(&residuals));
  for (size_t i = 0; i < codecs.size(); ++i) {
    for (size_t j = 0; j < sums[i].size(); ++j) {
      CHECK(std::fabs(residuals[i][j] - (sums[i][j] + gradients[i][j])) < 1e-6f);
    }
  }
}

void NothingThatIsSentIsLargerThanTheLargestMagnitude() {
  const Codecs codecs = AllKinds();
  const auto payload = ValidFixed(kMethod, codecs);
  FixedLengthDecoder decoder(codecs, kMethod, kFingerprint, kPlan, Threads(1));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  Tensors values = NormalTensors(codecs, 1, 1);
  CHECK(decoder.Reduce(Pointers(&values)));
  for (size_t i = 0; i < codecs.size(); ++i) {
    float largest = 0;
    for (float value : values[i]) largest = std::max(largest, std::fabs(value));
    CHECK(codecs[i]->LargestMagnitude(decoder.WordsOf(0, i)) == largest);
  }
}

void ANonFiniteGradientLeavesTheResidualsUntouched() {
  const Codecs codecs = AllKinds();
  for (float bad : {kInfinity, -kInfinity, std::nanf(""), -std::nanf(""), 3e38f}) {
    for (size_t tensor : {0, 1, 2, 5}) {
      Tensors residuals = NormalTensors(codecs, 1, 1);
      Tensors gradients = NormalTensors(codecs, 1, 100);
      gradients[tensor][200002] = bad;
      residuals[tensor][200002] = 3e38f;  // overflows only as a sum
      const Tensors before = residuals;
      const auto payload = EncodeFixed(kMethod, codecs, &residuals, gradients, Threads(2));
      CHECK(static_cast<int64_t>(payload.size()) == PayloadWords(codecs));
      CHECK(std::all_of(payload.begin() + kHeaderWords, payload.end(),
                        [](int32_t word) { return word == 0; }));
      FixedLengthDecoder decoder(codecs, kMethod, kFingerprint, kPlan, Threads(2));
      CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
      CHECK(!decoder.Reduce(Pointers(&gradients)));
      decoder.AddTo(Pointers(&residuals));
      for (size_t i = 0; i < codecs.size(); ++i) {
        CHECK(SameBits(residuals[i], before[i]));
        CHECK(SameBits(gradients[i], std::vector<float>(gradients[i].size())));
      }
    }
  }
}

// Buckets of values that are extremely far apart or close together.
void ExtremeBucketsAreFinite() {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  const Tensors extremes = {
      {kMost, -kMost, 0, 1e38f}, {kMost, kMost},  {kMost, 0},         {-kMost, -kMost},
      {kMost, std::nextafter(kMost, 0.0f)},       {kLeast, -kLeast},  {kLeast, 0},
      {-0.0f, -0.0f},            {0.0f, -0.0f},   {1, 1 + 0x1p-23f}};
  for (const std::vector<float>& gradient : extremes) {
    Codecs codecs;
    for (int bits = kMinQsgdBits; bits <= kMaxQsgdBits; ++bits) {
      codecs.push_back(std::make_unique<QsgdCodec>(gradient.size(), QsgdSettings{bits, 32}));
    }
    codecs.push_back(std::make_unique<SignSgdCodec>(gradient.size()));
    const Tensors gradients(codecs.size(), gradient);
    Tensors residuals(codecs.size(), std::vector<float>(gradient.size()));
    const auto payload = EncodeFixed(kMethod, codecs, &residuals, gradients, Threads(1));
    FixedLengthDecoder decoder(codecs, kMethod, kFingerprint, kPlan, Threads(1));
    CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
    Tensors outputs = residuals;
    CHECK(decoder.Reduce(Pointers(&outputs)));
    for (size_t i = 0; i < codecs.size(); ++i) {
      for (size_t j = 0; j < gradient.size(); ++j) {
        CHECK(std::isfinite(residuals[i][j]));
        const double sum = double{outputs[i][j]} + double{residuals[i][j]};
        CHECK(std::fabs(sum - gradient[j]) <= 1e-6 * std::fabs(double{outputs[i][j]}));
      }
    }
  }
}

// Memory in which only touched pages take space.
template <typename Value>
Value* MapZeros(int64_t size) {
  void* memory = mmap(nullptr, size * sizeof(Value), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  return static_cast<Value*>(memory);
}

// Only the last block.
void TensorsOfMoreThan2To31Elements() {
  constexpr int64_t kSize = (int64_t{1} << 31) + 12345;
  Codecs codecs;
  codecs.push_back(std::make_unique<QsgdCodec>(kSize, QsgdSettings{4, 1024}));
  codecs.push_back(std::make_unique<SignSgdCodec>(kSize));
  codecs.push_back(std::make_unique<WholeCodec>(kSize));
  for (const auto& codec : codecs) {
    float* residual = MapZeros<float>(kSize);
    float* gradient = MapZeros<float>(kSize);
    float* output = MapZeros<float>(kSize);
    int32_t* words = MapZeros<int32_t>(codec->words());
    const int64_t block = codec->num_blocks() - 1;
    CHECK(codec->BlockBegin(block) >= int64_t{1} << 31);
    CHECK(codec->BlockEnd(block) == kSize);
    const std::vector<float> values = Normal(kSize - codec->BlockBegin(block), 1, 1);
    std::copy(values.begin(), values.end(), gradient + codec->BlockBegin(block));
    const auto encoder =
        codec->NewEncoder({residual, gradient, GradientType::kFloat}, {kStep, 0, 0}, words);
    for (int pass = 0; pass < encoder->num_passes(); ++pass) {
      encoder->RunBlock(pass, block);
      encoder->EndPass(pass);
    }
    codec->AddBlock(words, block, output);
    for (int64_t i = codec->BlockBegin(block); i < kSize; ++i) {
      CHECK(output[i] != 0);
      CHECK(std::fabs(output[i] + residual[i] - gradient[i]) < 1e-6f);
    }
    for (float* memory : {residual, gradient, output}) munmap(memory, kSize * sizeof(float));
    munmap(words, codec->words() * sizeof(int32_t));
  }
}

// Also for extreme values, and for empty tensors.
void ErrorsDoNotDependOnThreadsAndAreAboutThoseOfWhatIsKept() {
  for (int64_t size : {0, 1, 33, 200003}) {
    std::vector<float> values = Normal(size, 1, 1);
    if (size == 33) values[5] = std::numeric_limits<float>::max();
    const QsgdSettings settings = {3, 96};
    const double error = QsgdError(values.data(), size, settings, Threads(1));
    for (int64_t threads : {2, 16}) {
      CHECK(QsgdError(values.data(), size, settings, Threads(threads)) == error);
    }
    CHECK(std::isfinite(error));
    if (size != 200003) continue;  // fewer elements vary by more
    Codecs codecs;
    codecs.push_back(std::make_unique<QsgdCodec>(size, settings));
    Tensors kept = {std::vector<float>(size)};
    EncodeFixed(kMethod, codecs, &kept, {values}, Threads(1));
    double sum = 0;
    for (double value : kept[0]) sum += value * value;
    CHECK(std::fabs(error - std::sqrt(sum)) <= 0.005 * error);
  }
}

void EveryBitFlipIsAnError() {
  Codecs codecs;
  codecs.push_back(std::make_unique<QsgdCodec>(300, QsgdSettings{4, 96}));
  codecs.push_back(std::make_unique<SignSgdCodec>(70));
  codecs.push_back(std::make_unique<WholeCodec>(5));
  auto payload = ValidFixed(kMethod, codecs);
  FixedLengthDecoder decoder(codecs, kMethod, kFingerprint, kPlan, Threads(1));
  for (size_t word = 0; word < payload.size(); ++word) {
    for (int bit = 0; bit < 32; ++bit) {
      payload[word] ^= 1u << bit;
      const Status status = decoder.Read(payload.data(), 1, payload.size(), kStep);
      CHECK(status.message.find("payload of replica 0: ") == 0);
      payload[word] ^= 1u << bit;
    }
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(CodesComeOutAsTheyWentIn);
  RUN(ThreadsDoNotChangeResults);
  RUN(WhatIsSentAndKeptIsWhatWasThereAndCanBePutBack);
  RUN(NothingThatIsSentIsLargerThanTheLargestMagnitude);
  RUN(ANonFiniteGradientLeavesTheResidualsUntouched);
  RUN(ExtremeBucketsAreFinite);
  RUN(TensorsOfMoreThan2To31Elements);
  RUN(ErrorsDoNotDependOnThreadsAndAreAboutThoseOfWhatIsKept);
  RUN(EveryBitFlipIsAnError);
}
