#include "largest.h"

#include <iterator>
#include <numeric>
#include <utility>

#include "common.h"

namespace gradcomp {
namespace {

constexpr int64_t kFirstDigits = 1 << 11;
constexpr int kDigitBits = 10;

// Returns the digit of the entry with rank `*rank` from the top; `*rank` becomes its rank among the
// entries with this digit.
template <typename Histogram>
uint32_t DigitOfRank(const Histogram& histogram, int64_t* rank) {
  uint32_t digit = std::size(histogram) - 1;
  for (; *rank > histogram[digit]; --digit) *rank -= histogram[digit];
  return digit;
}

}  // namespace

bool LargestEntries::Count(int64_t block) {
  const auto first_digit = [](float value) { return MagnitudeBits(value) >> kFirstShift; };
  // Neighbours often have the same digit. With two histograms, their increments don't depend on
  // each other.
  std::vector<uint32_t> even(kFirstDigits);
  uint32_t odd[kFirstDigits] = {};
  ForEachStrip(block, [&](int64_t, int64_t size, const float* sums) {
    for (int64_t i = 0; i + 1 < size; i += 2) {
      ++even[first_digit(sums[i])];
      ++odd[first_digit(sums[i + 1])];
    }
    if (size % 2 != 0) ++even[first_digit(sums[size - 1])];
  });
  for (int64_t digit = 0; digit < kFirstDigits; ++digit) even[digit] += odd[digit];
  const auto infinity = even.begin() + (kInfinityBits >> kFirstShift);
  const bool finite = std::accumulate(infinity, even.end(), 0u) == 0;
  blocks_[block].histogram = std::move(even);
  return finite;
}

void LargestEntries::EndCount() {
  int64_t histogram[kFirstDigits] = {};
  for (const Block& block : blocks_) {
    for (int64_t digit = 0; digit < kFirstDigits; ++digit) {
      histogram[digit] += block.histogram[digit];
    }
  }
  first_digit_ = DigitOfRank(histogram, &rank_);
}

std::vector<LargestEntries::Entry> LargestEntries::RoomFor(int64_t block) {
  const std::vector<uint32_t> histogram = std::move(blocks_[block].histogram);
  const auto first = histogram.begin() + first_digit_;
  return std::vector<Entry>(std::accumulate(first, histogram.end(), int64_t{1}));
}

uint32_t LargestEntries::SmallestMagnitude() {
  uint32_t smallest = first_digit_ << kFirstShift;
  for (int shift = kFirstShift - kDigitBits; shift >= 0; shift -= kDigitBits) {
    int64_t histogram[1 << kDigitBits] = {};
    for (const Block& block : blocks_) {
      for (const Entry& candidate : block.candidates) {
        const uint32_t digit = (MagnitudeBits(candidate.value) - smallest) >> shift;
        if (digit < std::size(histogram)) ++histogram[digit];
      }
    }
    smallest += DigitOfRank(histogram, &rank_) << shift;
  }
  return smallest;
}

}  // namespace gradcomp
