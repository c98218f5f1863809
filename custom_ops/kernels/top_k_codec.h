// Sends the entries of a tensor with the largest magnitudes: their ascending indices, and then
// their values. Among entries with equal magnitudes, the first are sent.
#pragma once

#include <cstdint>
#include <memory>

#include "codec.h"
#include "largest.h"

namespace gradcomp {

class TopKCodec : public Codec {
 public:
  // `entries` is at most `size`, and `size` at most 2^32.
  TopKCodec(int64_t size, int64_t entries)
      : Codec(size, 2 * entries, LargestEntries::kBlockSize), entries_(entries) {}

  int64_t entries() const { return entries_; }

  std::unique_ptr<TensorEncoder> NewEncoder(const Source& source, const Turn& turn,
                                            int32_t* words) const override;
  Status Check(const int32_t* words) const override;
  void AddBlock(const int32_t* words, int64_t block, float* values) const override;
  double LargestMagnitude(const int32_t* words) const override {
    return gradcomp::LargestMagnitude(words + entries_, entries_);
  }

  // Sets the sent entries of `values` to zero; the words have been checked.
  void ClearSent(const int32_t* words, float* values) const;

 private:
  const int64_t entries_;
};

}  // namespace gradcomp
