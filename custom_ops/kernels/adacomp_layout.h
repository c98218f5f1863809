// AdaComp's bins and blocks of tensors, and the table in its payload.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "adacomp_codes.h"
#include "common.h"

namespace gradcomp {

// A tensor's entry in the table before the codes.
struct TableEntry {
  float scale;
  uint32_t code_words;
};
static_assert(sizeof(TableEntry) == 8, "the table is copied to the wire as it lies in memory");

inline constexpr int64_t kTableEntryWords = sizeof(TableEntry) / sizeof(int32_t);

// Returns a tensor's entry in the table at the beginning of a body.
inline TableEntry EntryOf(const int32_t* body, int64_t tensor) {
  TableEntry entry;
  std::memcpy(&entry, body + tensor * kTableEntryWords, sizeof entry);
  return entry;
}

// A tensor is cut into bins, and consecutive bins into blocks that are processed in parallel.
// Neither blocks nor results depend on the number of threads.
struct Binning {
  Binning(int64_t size, int64_t bin_size)
      : size(size),
        sent_whole(bin_size == 0),
        bin_size(sent_whole ? kWholeBinSize : bin_size),
        num_bins(CeilDiv(size, this->bin_size)),
        bins_per_block(std::max<int64_t>(1, kBlockSize / this->bin_size)),
        num_blocks(CeilDiv(num_bins, bins_per_block)) {}

  int64_t FirstElement(int64_t block) const { return block * bins_per_block * bin_size; }
  int64_t BlockSize(int64_t block) const {
    return std::min(bins_per_block * bin_size, size - FirstElement(block));
  }
  int64_t BlockBins(int64_t block) const {
    return std::min(bins_per_block, num_bins - block * bins_per_block);
  }

  // Returns the number of words before the codes: the bytes of each block's codes, without the last
  // block.
  int64_t LengthWords() const { return sent_whole || num_blocks == 0 ? 0 : num_blocks - 1; }

  static constexpr int64_t kWholeBinSize = 1024;  // the bins of tensors sent whole, which have no codes

  int64_t size;  // elements
  bool sent_whole;
  int64_t bin_size;
  int64_t num_bins;
  int64_t bins_per_block;
  int64_t num_blocks;
};

// The table has the number of code words in 32 bits, and no element takes more than a word.
inline Status CheckTensorSize(int64_t tensor, int64_t size) {
  constexpr int64_t kMaxSize = 0xffffffff;
  if (size <= kMaxSize) return {};
  return {Concat("tensor ", tensor, " has ", size, " elements; expected at most ", kMaxSize,
                 ": split the variable")};
}

// Describes in one sentence the first bin size that can't be encoded.
inline Status CheckBinSizes(const std::vector<int64_t>& bin_sizes, int64_t num_tensors) {
  if (static_cast<int64_t>(bin_sizes.size()) != num_tensors) {
    return {Concat("bin_sizes has ", bin_sizes.size(), " entries; expected ", num_tensors,
                   ": give one bin size for each tensor")};
  }
  for (size_t i = 0; i < bin_sizes.size(); ++i) {
    if (bin_sizes[i] < 0 || bin_sizes[i] > kMaxBinSize) {
      return {Concat("bin_sizes[", i, "] is ", bin_sizes[i], "; expected 1 to ", kMaxBinSize,
                     ", or 0 to send the tensor whole: choose a bin size in this range")};
    }
  }
  return {};
}

}  // namespace gradcomp
