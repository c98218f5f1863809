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

  absl::Status Read(OpKernelConstruction*, int) { return absl::OkStatus(); }
  std::unique_ptr<const Codec> NewCodec(int, int64_t size) const {
    return std::make_unique<SignSgdCodec>(size);
  }
};

GRADCOMP_ENCODE_OP("SignSgdEncode");
GRADCOMP_DECODE_OP("SignSgdDecode");
GRADCOMP_PUT_BACK_OP("SignSgdPutBack");

REGISTER_KERNEL_BUILDER(Name("SignSgdEncode").Device(DEVICE_CPU),
                        FixedLengthEncodeOp<SignSgdSettings>);
REGISTER_KERNEL_BUILDER(Name("SignSgdDecode").Device(DEVICE_CPU),
                        FixedLengthDecodeOp<SignSgdSettings>);
REGISTER_KERNEL_BUILDER(Name("SignSgdPutBack").Device(DEVICE_CPU),
                        FixedLengthPutBackOp<SignSgdSettings>);

}  // namespace
}  // namespace gradcomp
