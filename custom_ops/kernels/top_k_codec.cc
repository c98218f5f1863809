#include "top_k_codec.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

namespace gradcomp {
namespace {

constexpr int64_t kStripSize = 1 << 10;  // elements: what is computed of them stays in the cache

// Magnitudes are 31 bits: a first digit of 11, exponent and 3 bits of the mantissa, then two of 10.
constexpr int kFirstShift = 20;
constexpr int64_t kFirstDigits = 1 << 11;
constexpr int kDigitBits = 10;
constexpr uint32_t kInfinityDigit = kInfinityBits >> kFirstShift;

struct Candidate {
  uint32_t index;
  float value;
};

uint32_t FirstDigit(float value) { return MagnitudeBits(value) >> kFirstShift; }

uint32_t IndexAt(const int32_t* words, int64_t entry) { return static_cast<uint32_t>(words[entry]); }

// The digit of the entry that is `*rank`-th from the top; `*rank` becomes its rank among those with
// this digit.
template <typename Histogram>
uint32_t DigitOfRank(const Histogram& histogram, int64_t* rank) {
  uint32_t digit = std::size(histogram) - 1;
  for (; *rank > histogram[digit]; --digit) *rank -= histogram[digit];
  return digit;
}

// Finds the magnitude of the last entry to be sent, digit by digit: the first digit by a pass over
// all elements, the others among the few that reach it. Then sends what is above, and of what is
// equal the first ones.
class TopKEncoder : public TensorEncoder {
 public:
  TopKEncoder(const TopKCodec& codec, const Source& source, int32_t* words)
      : TensorEncoder(3), codec_(codec), source_(source), words_(words),
        blocks_(codec.num_blocks()) {}

  void RunBlock(int pass, int64_t block) override {
    if (pass == 0) Count(block);
    if (pass == 1) Collect(block);
    if (pass == 2 && block == 0) Send();
  }

  void EndPass(int pass) override {
    if (pass == 0 && finite()) FindFirstDigit();
  }

 private:
  struct Block {
    std::vector<uint32_t> histogram;    // of first digits
    std::vector<Candidate> candidates;  // all that reach the first digit
  };

  // Calls work(begin, size, sums), a strip at a time.
  template <typename Work>
  void ForEachStrip(int64_t block, const Work& work) const {
    float sums[kStripSize];
    const int64_t end = codec_.BlockEnd(block);
    for (int64_t begin = codec_.BlockBegin(block); begin < end; begin += kStripSize) {
      const int64_t size = std::min(kStripSize, end - begin);
      Accumulate(source_, begin, size, sums);
      work(begin, size, sums);
    }
  }

  template <typename Work>
  void ForEachCandidate(const Work& work) const {
    for (const Block& block : blocks_) {
      for (const Candidate& candidate : block.candidates) work(candidate);
    }
  }

  void Count(int64_t block);
  void FindFirstDigit();
  void Collect(int64_t block);
  void Send();

  const TopKCodec& codec_;
  const Source source_;
  int32_t* const words_;
  std::vector<Block> blocks_;
  uint32_t first_digit_ = 0;  // of the last entry to be sent
  int64_t rank_ = 0;          // of that entry among those with this digit
};

void TopKEncoder::Count(int64_t block) {
  // Neighbours often have the same digit: in two histograms, their counts don't wait for each other.
  std::vector<uint32_t> even(kFirstDigits);
  uint32_t odd[kFirstDigits] = {};
  ForEachStrip(block, [&](int64_t, int64_t size, const float* sums) {
    for (int64_t i = 0; i + 1 < size; i += 2) {
      ++even[FirstDigit(sums[i])];
      ++odd[FirstDigit(sums[i + 1])];
    }
    if (size % 2 != 0) ++even[FirstDigit(sums[size - 1])];
  });
  for (int64_t digit = 0; digit < kFirstDigits; ++digit) even[digit] += odd[digit];
  if (std::accumulate(even.begin() + kInfinityDigit, even.end(), 0u) > 0) SetNotFinite();
  blocks_[block].histogram = std::move(even);
}

void TopKEncoder::FindFirstDigit() {
  int64_t histogram[kFirstDigits] = {};
  for (const Block& block : blocks_) {
    for (int64_t digit = 0; digit < kFirstDigits; ++digit) histogram[digit] += block.histogram[digit];
  }
  rank_ = codec_.entries();
  first_digit_ = DigitOfRank(histogram, &rank_);
}

void TopKEncoder::Collect(int64_t block) {
  const std::vector<uint32_t> histogram = std::move(blocks_[block].histogram);
  const int64_t count =
      std::accumulate(histogram.begin() + first_digit_, histogram.end(), int64_t{0});
  // One more, for each element is written down before it is known whether it counts.
  std::vector<Candidate> candidates(count + 1);
  Candidate* next = candidates.data();
  const uint32_t smallest = first_digit_ << kFirstShift;
  ForEachStrip(block, [&](int64_t begin, int64_t size, const float* sums) {
    for (int64_t i = 0; i < size; ++i) {
      *next = {static_cast<uint32_t>(begin + i), sums[i]};
      next += MagnitudeBits(sums[i]) >= smallest;
    }
    // What does not change stays unwritten: the rows of a table that are not used.
    float* residual = source_.residual + begin;
    if (std::memcmp(residual, sums, 4 * size) != 0) std::memcpy(residual, sums, 4 * size);
  });
  candidates.pop_back();
  blocks_[block].candidates = std::move(candidates);
}

void TopKEncoder::Send() {
  uint32_t smallest = first_digit_ << kFirstShift;
  for (int shift = kFirstShift - kDigitBits; shift >= 0; shift -= kDigitBits) {
    int64_t histogram[1 << kDigitBits] = {};
    ForEachCandidate([&](const Candidate& candidate) {
      const uint32_t digit = (MagnitudeBits(candidate.value) - smallest) >> shift;
      if (digit < std::size(histogram)) ++histogram[digit];
    });
    smallest += DigitOfRank(histogram, &rank_) << shift;
  }
  int32_t* index = words_;
  int32_t* value = words_ + codec_.entries();
  ForEachCandidate([&](const Candidate& candidate) {
    const uint32_t magnitude = MagnitudeBits(candidate.value);
    if (magnitude < smallest || (magnitude == smallest && --rank_ < 0)) return;
    *index++ = static_cast<int32_t>(candidate.index);
    *value++ = static_cast<int32_t>(ToBits(candidate.value));
    source_.residual[candidate.index] = 0;
  });
}

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
