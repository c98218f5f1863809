// SignSGD's ops. What they compute: tf_gradcomp/ops/sign_sgd.py.
#include "../kernels/sign_sgd_codec.h"

#include <memory>

#include "fixed_length_ops.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernelConstruction;

struct SignSgdSettings {
  static constexpr Method kMethod = Method::kSignSgd;
  static constexpr bool kDependsOnReplica = false;
  static constexpr const char* kMain = nullptr;

  absl::Status Read(OpKernelConstruction*) { return absl::OkStatus(); }
  std::unique_ptr<const Codec> NewCodec(int64_t size, int64_t) const {
    return std::make_unique<SignSgdCodec>(size);
  }
};

GRADCOMP_ENCODE_OP("SignSgdEncode").SetShapeFn(EncodeShape);
GRADCOMP_DECODE_OP("SignSgdDecode").SetShapeFn(DecodeShape);
GRADCOMP_PUT_BACK_OP("SignSgdPutBack").SetShapeFn(PutBackShape);

REGISTER_KERNEL_BUILDER(Name("SignSgdEncode").Device(DEVICE_CPU),
                        FixedLengthEncodeOp<SignSgdSettings>);
REGISTER_KERNEL_BUILDER(Name("SignSgdDecode").Device(DEVICE_CPU),
                        FixedLengthDecodeOp<SignSgdSettings>);
REGISTER_KERNEL_BUILDER(Name("SignSgdPutBack").Device(DEVICE_CPU),
                        FixedLengthPutBackOp<SignSgdSettings>);

}  // namespace
}  // namespace gradcomp
