// SignSGD with error feedback: the sign of each element, and the mean magnitude of the tensor.
#pragma once

#include <cstdint>
#include <memory>

#include "codec.h"

namespace gradcomp {

// A tensor has one word for the mean magnitude, then one bit per element: 1 if the element is
// negative. A tensor without elements takes no words.
class SignSgdCodec : public Codec {
 public:
  explicit SignSgdCodec(int64_t size);

  // The number of lanes in which magnitudes of a block are summed: element i in lane i mod kLanes.
  // The sums of lanes are then added, and then the sums of blocks. Vector instructions can use this
  // order, too.
  static constexpr int64_t kLanes = 8;

  std::unique_ptr<TensorEncoder> NewEncoder(const Source& source, const Turn& turn,
                                            int32_t* words) const override;
  Status Check(const int32_t* words) const override;
  void AddBlock(const int32_t* words, int64_t block, float* values) const override;
  double LargestMagnitude(const int32_t* words) const override;
};

}  // namespace gradcomp
