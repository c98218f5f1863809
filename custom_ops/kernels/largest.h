// The entries of residual + gradient with the largest magnitudes; among equal magnitudes, the
// first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "source.h"

namespace gradcomp {

// Finds the magnitude of the last entry digit by digit. The first pass over all blocks of a tensor
// finds the first digit. The second pass collects the few entries that reach this digit, and the
// other digits are found among them. The blocks of a pass may run in parallel without an effect on
// the result.
class LargestEntries {
 public:
  struct Entry {
    uint32_t index;
    float value;
  };

  // Large, because each block has a histogram.
  static constexpr int64_t kBlockSize = 1 << 17;

  // `count` is at most `size`, and `size` at most 2^32.
  LargestEntries(const Source& source, int64_t size, int64_t count)
      : source_(source), size_(size), rank_(count), blocks_(CeilDiv(size, kBlockSize)) {}

  int64_t num_blocks() const { return blocks_.size(); }

  // Runs the first pass. Returns whether the whole block is finite. Infinite values are the largest
  // but for NaN.
  bool Count(int64_t block);

  // Must be called when all blocks are counted.
  void EndCount();

  // Runs the second pass. Calls work(begin, size, sums) for the strips of a block in order.
  template <typename DoStrip>
  void Collect(int64_t block, const DoStrip& work);

  // Calls work(entry) for each entry, by ascending index, when all blocks are collected.
  template <typename DoEntry>
  void Finish(const DoEntry& work);

 private:
  // Magnitudes have 31 bits: a first digit of 11 bits, the exponent and 3 bits of the mantissa, and
  // two digits of 10 bits.
  static constexpr int kFirstShift = 20;

  static constexpr int64_t kStrip = 1 << 10;  // elements whose sums stay in the cache

  struct Block {
    std::vector<uint32_t> histogram;  // for the first digit
    std::vector<Entry> candidates;    // entries that reach the first digit
  };

  template <typename DoStrip>
  void ForEachStrip(int64_t block, const DoStrip& work) const {
    float sums[kStrip];
    const int64_t end = std::min(size_, (block + 1) * kBlockSize);
    for (int64_t begin = block * kBlockSize; begin < end; begin += kStrip) {
      const int64_t size = std::min(kStrip, end - begin);
      Accumulate(source_, begin, size, sums);
      work(begin, size, sums);
    }
  }

  // Returns the smallest magnitude among the largest entries. `rank_` becomes the number of largest
  // entries with this magnitude.
  uint32_t SmallestMagnitude();

  // Returns room for the candidates of a block, and for one more.
  std::vector<Entry> RoomFor(int64_t block);

  const Source source_;
  const int64_t size_;
  int64_t rank_;  // of the last entry, among the entries with the known digits
  std::vector<Block> blocks_;
  uint32_t first_digit_ = 0;  // of the last entry
};

template <typename DoStrip>
void LargestEntries::Collect(int64_t block, const DoStrip& work) {
  // Has room for one more, because each element is written before its check.
  std::vector<Entry> candidates = RoomFor(block);
  Entry* next = candidates.data();
  const uint32_t smallest = first_digit_ << kFirstShift;
  ForEachStrip(block, [&](int64_t begin, int64_t size, const float* sums) {
    for (int64_t i = 0; i < size; ++i) {
      *next = {static_cast<uint32_t>(begin + i), sums[i]};
      next += MagnitudeBits(sums[i]) >= smallest;
    }
    work(begin, size, sums);
  });
  candidates.pop_back();
  blocks_[block].candidates = std::move(candidates);
}

template <typename DoEntry>
void LargestEntries::Finish(const DoEntry& work) {
  const uint32_t smallest = SmallestMagnitude();
  for (const Block& block : blocks_) {
    for (const Entry& entry : block.candidates) {
      const uint32_t magnitude = MagnitudeBits(entry.value);
      if (magnitude < smallest || (magnitude == smallest && --rank_ < 0)) continue;
      work(entry);
    }
  }
}

}  // namespace gradcomp
