#include "../kernels/qsgd_codec.h"
#include "../kernels/whole_codec.h"
#include "check_fixed.h"
#include "qsgd_on_gpu.h"
#include "self_check.h"

namespace gradcomp {

// Buckets that warps measure and those that blocks do, and both ways to round.
Status CheckQsgd(DriverQueue* queue) {
  for (int64_t bucket_size : {96, 8192}) {
    const bool stochastic = bucket_size == 96;
    Codecs codecs;
    codecs.push_back(std::make_unique<WholeCodec>(300));
    for (int bits = kMinQsgdBits; bits <= kMaxQsgdBits; ++bits) {
      const QsgdSettings settings = {bits, bucket_size, stochastic, 7};
      codecs.push_back(std::make_unique<QsgdCodec>(bits == 4 ? 9001 : 1000 + bits, settings));
    }
    const Status status =
        CheckFixed({"QSGD", Method::kQsgd, EncodeQsgdOnGpu, DecodeQsgdOnGpu}, codecs, queue);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace gradcomp
