#include "whole_codec.h"

#include <algorithm>
#include <cstring>

namespace gradcomp {
namespace {

// Copies the sums into the words, and then clears the residual.
class WholeEncoder : public TensorEncoder {
 public:
  WholeEncoder(const WholeCodec& codec, const Source& source, int32_t* words)
      : TensorEncoder(2), codec_(codec), source_(source), sums_(reinterpret_cast<float*>(words)) {}

  void RunBlock(int pass, int64_t block) override {
    const int64_t begin = codec_.BlockBegin(block);
    const int64_t size = codec_.BlockEnd(block) - begin;
    if (pass == 1) {
      std::fill_n(source_.residual + begin, size, 0.0f);
      return;
    }
    Accumulate(source_, begin, size, sums_ + begin);
    if (!AllFinite(sums_ + begin, size)) SetNotFinite();
  }

 private:
  const WholeCodec& codec_;
  const Source source_;
  float* const sums_;
};

}  // namespace

std::unique_ptr<TensorEncoder> WholeCodec::NewEncoder(const Source& source, const Turn&,
                                                      int32_t* words) const {
  return std::make_unique<WholeEncoder>(*this, source, words);
}

Status WholeCodec::Check(const int32_t* words) const {
  if (AllFinite(words, size())) return {};
  return {"a value is not finite; expected the non-finite flag with it"};
}

void WholeCodec::AddBlock(const int32_t* words, int64_t block, float* values) const {
  for (int64_t i = BlockBegin(block); i < BlockEnd(block); ++i) {
    float value;
    std::memcpy(&value, words + i, sizeof value);
    values[i] += value;
  }
}

}  // namespace gradcomp
