// SignSGD's ops, documented in tf_gradcomp/ops/quantization.py.
#include <memory>

#include "../gpu/sign_sgd_on_gpu.h"
#include "../kernels/sign_sgd_codec.h"
#include "fixed_length_ops.h"

namespace gradcomp {
namespace {

struct SignSgdSettings : FixedLengthMethod<Method::kSignSgd> {
  static constexpr const char* kMain = nullptr;
  static constexpr auto kEncodeOnGpu = EncodeSignSgdOnGpu;
  static constexpr auto DecodeOnGpu = DecodeSignSgdOnGpu;

  std::unique_ptr<const Codec> NewCodec(int64_t size, int64_t) const {
    return std::make_unique<SignSgdCodec>(size);
  }
};

GRADCOMP_ENCODE_OP("SignSgdEncode").SetShapeFn(EncodeShape);
GRADCOMP_DECODE_OP("SignSgdDecode").SetShapeFn(DecodeShape);
GRADCOMP_PUT_BACK_OP("SignSgdPutBack").SetShapeFn(PutBackShape);

GRADCOMP_FIXED_LENGTH_KERNELS("SignSgd", SignSgdSettings, , );

}  // namespace
}  // namespace gradcomp
