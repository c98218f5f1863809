// QSGD in the form of CGX and L-GreCo: each bucket has a minimum and a unit, and its elements are
// levels of a few bits.
#pragma once

#include <cstdint>
#include <memory>

#include "codec.h"

namespace gradcomp {

inline constexpr int64_t kMinQsgdBits = 2;
inline constexpr int64_t kMaxQsgdBits = 8;
inline constexpr int64_t kBucketStep = 32;  // levels that fill whole words
inline constexpr int64_t kMaxBucketSize = 1 << 16;

struct QsgdSettings {
  int bits;             // per level
  int64_t bucket_size;  // elements, a multiple of kBucketStep
};

// Each bucket has its minimum and its unit, one word each, and then its levels. The last bucket may
// be short, with zeros after its last level.
class QsgdCodec : public Codec {
 public:
  QsgdCodec(int64_t size, const QsgdSettings& settings);

  const QsgdSettings& settings() const { return settings_; }

  std::unique_ptr<TensorEncoder> NewEncoder(const Source& source, const Turn& turn,
                                            int32_t* words) const override;
  Status Check(const int32_t* words) const override;
  void AddBlock(const int32_t* words, int64_t block, float* values) const override;
  double LargestMagnitude(const int32_t* words) const override;

 private:
  const QsgdSettings settings_;
};

// Returns the root of the expected square of the L2 norm of the rounding errors of finite values. The result does not depend on the number of threads.
double QsgdError(const float* values, int64_t size, const QsgdSettings& settings,
                 const ParallelFor& parallel_for);

}  // namespace gradcomp
