// Sends a tensor whole, with one float32 word for each element.
#pragma once

#include <cstdint>
#include <memory>

#include "codec.h"

namespace gradcomp {

class WholeCodec : public Codec {
 public:
  explicit WholeCodec(int64_t size) : Codec(size, size, kBlockSize) {}

  std::unique_ptr<TensorEncoder> NewEncoder(const Source& source, const Turn& turn,
                                            int32_t* words) const override;
  Status Check(const int32_t* words) const override;
  void AddBlock(const int32_t* words, int64_t block, float* values) const override;
  double LargestMagnitude(const int32_t* words) const override {
    return gradcomp::LargestMagnitude(words, size());
  }
};

}  // namespace gradcomp
