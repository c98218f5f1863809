#include "sign_sgd_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "pack_bits.h"
#include "simd.h"

namespace gradcomp {
namespace {

constexpr int kBits = 1;
constexpr int64_t kMeanWords = 1;

int64_t WordsOf(int64_t size) { return size == 0 ? 0 : kMeanWords + PackedWords(size, kBits); }

// Returns the words of the signs from element `begin` on, the first element of a chunk.
template <typename Word>
Word* SignsAt(Word* words, int64_t begin) {
  return words + kMeanWords + begin / 32;
}

constexpr Vectorized AddMagnitudes{[](const float* values, int64_t size,
                                      double* lanes) GRADCOMP_INLINED {
  constexpr int64_t kLanes = SignSgdCodec::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += std::fabs(values[i + lane]);
  }
  for (; i < size; ++i) lanes[i % kLanes] += std::fabs(values[i]);
}};

// Sends +mean or -mean for each value, and keeps the rest. 0 and -0 count as positive.
constexpr Vectorized SendSigns{[](const float* values, int64_t size, float mean, uint8_t* codes,
                                  float* residual) GRADCOMP_INLINED {
  for (int64_t i = 0; i < size; ++i) {
    const bool negative = values[i] < 0;
    codes[i] = negative;
    residual[i] = values[i] - (negative ? -mean : mean);
  }
}};

constexpr Vectorized AddSigns{[](const uint8_t* codes, int64_t size, float mean,
                                 float* values) GRADCOMP_INLINED {
  for (int64_t i = 0; i < size; ++i) values[i] += codes[i] ? -mean : mean;
}};

class SignSgdEncoder : public TensorEncoder {
 public:
  SignSgdEncoder(const SignSgdCodec& codec, const Source& source, int32_t* words)
      : TensorEncoder(2),
        codec_(codec),
        source_(source),
        words_(words),
        block_sums_(codec.num_blocks()) {}

  void RunBlock(int pass, int64_t block) override {
    double lanes[SignSgdCodec::kLanes] = {};
    const int64_t end = codec_.BlockEnd(block);
    for (int64_t begin = codec_.BlockBegin(block); begin < end; begin += CodeChunk::kSize) {
      const int64_t size = std::min(CodeChunk::kSize, end - begin);
      float values[CodeChunk::kSize];
      Accumulate(source_, begin, size, values);
      if (pass == 0) {
        AddMagnitudes(values, size, lanes);
      } else {
        CodeChunk chunk;
        SendSigns(values, size, mean_, chunk.codes(), source_.residual + begin);
        chunk.Pack(size, kBits, SignsAt(words_, begin));
      }
    }
    for (double sum : lanes) block_sums_[block] += sum;
  }

  void EndPass(int pass) override {
    if (pass != 0 || block_sums_.empty()) return;
    double sum = 0;
    for (double block_sum : block_sums_) sum += block_sum;
    if (!std::isfinite(sum)) return SetNotFinite();
    mean_ = static_cast<float>(sum / static_cast<double>(codec_.size()));
    std::memcpy(words_, &mean_, sizeof mean_);
  }

 private:
  const SignSgdCodec& codec_;
  const Source source_;
  int32_t* const words_;
  std::vector<double> block_sums_;  // of magnitudes
  float mean_ = 0;
};

}  // namespace

SignSgdCodec::SignSgdCodec(int64_t size) : Codec(size, WordsOf(size), kBlockSize) {}

std::unique_ptr<TensorEncoder> SignSgdCodec::NewEncoder(const Source& source, const Turn&,
                                                        int32_t* words) const {
  return std::make_unique<SignSgdEncoder>(*this, source, words);
}

Status SignSgdCodec::Check(const int32_t* words) const {
  if (size() == 0) return {};
  const uint32_t mean = words[0];
  if (mean >= kInfinityBits) {
    return {Concat("mean magnitude ", FromBits(mean), "; expected a finite one, not negative")};
  }
  return CheckPadding(words + kMeanWords, size(), kBits);
}

double SignSgdCodec::LargestMagnitude(const int32_t* words) const {
  return size() == 0 ? 0 : FromBits(words[0]);
}

void SignSgdCodec::AddBlock(const int32_t* words, int64_t block, float* values) const {
  const float mean = FromBits(words[0]);
  for (int64_t begin = BlockBegin(block); begin < BlockEnd(block); begin += CodeChunk::kSize) {
    const int64_t size = std::min(CodeChunk::kSize, BlockEnd(block) - begin);
    CodeChunk chunk;
    chunk.Unpack(SignsAt(words, begin), size, kBits);
    AddSigns(chunk.codes(), size, mean, values + begin);
  }
}

}  // namespace gradcomp
