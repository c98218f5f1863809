#include "top_k_codec.h"

#include <algorithm>
#include <cstring>

#include "largest.h"

namespace gradcomp {
namespace {

uint32_t IndexAt(const int32_t* words, int64_t entry) { return static_cast<uint32_t>(words[entry]); }

// Sends all values above the last entry's magnitude, and the first values with this magnitude.
class TopKEncoder : public TensorEncoder {
 public:
  TopKEncoder(const TopKCodec& codec, const Source& source, int32_t* words)
      : TensorEncoder(3), source_(source), words_(words), entries_(codec.entries()),
        largest_(source, codec.size(), codec.entries()) {}

  void RunBlock(int pass, int64_t block) override {
    if (pass == 0 && !largest_.Count(block)) SetNotFinite();
    if (pass == 1) Collect(block);
    if (pass == 2 && block == 0) Send();
  }

  void EndPass(int pass) override {
    if (pass == 0 && finite()) largest_.EndCount();
  }

 private:
  void Collect(int64_t block) {
    largest_.Collect(block, [&](int64_t begin, int64_t size, const float* sums) {
      // Unchanged values are not written, such as unused rows of a table.
      float* residual = source_.residual + begin;
      if (std::memcmp(residual, sums, 4 * size) != 0) std::memcpy(residual, sums, 4 * size);
    });
  }

  void Send() {
    int32_t* index = words_;
    int32_t* value = words_ + entries_;
    largest_.Finish([&](const LargestEntries::Entry& entry) {
      *index++ = static_cast<int32_t>(entry.index);
      *value++ = static_cast<int32_t>(ToBits(entry.value));
      source_.residual[entry.index] = 0;
    });
  }

  const Source source_;
  int32_t* const words_;
  const int64_t entries_;
  LargestEntries largest_;
};

}  // namespace

std::unique_ptr<TensorEncoder> TopKCodec::NewEncoder(const Source& source, const Turn&,
                                                     int32_t* words) const {
  return std::make_unique<TopKEncoder>(*this, source, words);
}

Status TopKCodec::Check(const int32_t* words) const {
  int64_t before = -1;
  for (int64_t i = 0; i < entries_; ++i) {
    const int64_t index = IndexAt(words, i);
    if (index <= before || index >= size()) {
      return {Concat("index ", index, " of entry ", i, "; expected one above ", before,
                     " and below ", size())};
    }
    before = index;
  }
  if (AllFinite(words + entries_, entries_)) return {};
  return {"a value is not finite; expected the non-finite flag with it"};
}

void TopKCodec::AddBlock(const int32_t* words, int64_t block, float* values) const {
  const auto below = [](int32_t word, int64_t index) { return static_cast<uint32_t>(word) < index; };
  const int32_t* end = words + entries_;
  for (const int32_t* entry = std::lower_bound(words, end, BlockBegin(block), below);
       entry != end && static_cast<uint32_t>(*entry) < BlockEnd(block); ++entry) {
    values[static_cast<uint32_t>(*entry)] += FromBits(entry[entries_]);
  }
}

void TopKCodec::ClearSent(const int32_t* words, float* values) const {
  for (int64_t i = 0; i < entries_; ++i) values[IndexAt(words, i)] = 0;
}

}  // namespace gradcomp
