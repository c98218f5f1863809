// QSGD's ops. What they compute: tf_gradcomp/ops/qsgd.py.
#include <cstdint>
#include <memory>
#include <vector>

#include "../kernels/qsgd_codec.h"
#include "../kernels/whole_codec.h"
#include "fixed_length_ops.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernelConstruction;

absl::Status CheckBits(const std::vector<int64_t>& bits, int num_tensors) {
  if (bits.size() != num_tensors) {
    return InvalidArgument("bits has ", bits.size(), " entries; expected ", num_tensors,
                           ": give one number of bits for each tensor");
  }
  for (int i = 0; i < num_tensors; ++i) {
    if (bits[i] == 0 || (bits[i] >= kMinQsgdBits && bits[i] <= kMaxQsgdBits)) continue;
    return InvalidArgument("bits[", i, "] is ", bits[i], "; expected ", kMinQsgdBits, " to ",
                           kMaxQsgdBits, ", or 0 to send the tensor whole");
  }
  return absl::OkStatus();
}

absl::Status CheckBucketSize(int64_t size) {
  if (size > 0 && size <= kMaxBucketSize && size % kBucketStep == 0) return absl::OkStatus();
  return InvalidArgument("bucket_size is ", size, "; expected a multiple of ", kBucketStep,
                         " up to ", kMaxBucketSize);
}

class QsgdOpSettings {
 public:
  static constexpr Method kMethod = Method::kQsgd;
  static constexpr bool kDependsOnReplica = true;

  absl::Status Read(OpKernelConstruction* context, int num_tensors) {
    TF_RETURN_IF_ERROR(context->GetAttr("bits", &bits_));
    TF_RETURN_IF_ERROR(context->GetAttr("bucket_size", &bucket_size_));
    if (context->HasAttr("seed")) {  // only the encoder rounds
      TF_RETURN_IF_ERROR(context->GetAttr("stochastic", &stochastic_));
      TF_RETURN_IF_ERROR(context->GetAttr("seed", &seed_));
    }
    TF_RETURN_IF_ERROR(CheckBits(bits_, num_tensors));
    return CheckBucketSize(bucket_size_);
  }

  std::unique_ptr<const Codec> NewCodec(int tensor, int64_t size) const {
    if (bits_[tensor] == 0) return std::make_unique<WholeCodec>(size);
    const QsgdSettings settings = {static_cast<int>(bits_[tensor]), bucket_size_, stochastic_,
                                   seed_};
    return std::make_unique<QsgdCodec>(size, settings);
  }

 private:
  std::vector<int64_t> bits_;
  int64_t bucket_size_;
  bool stochastic_ = false;
  int64_t seed_ = 0;
};

GRADCOMP_ENCODE_OP("QsgdEncode")
    .Input("replica: int64")
    .Attr("bits: list(int)")
    .Attr("bucket_size: int")
    .Attr("stochastic: bool")
    .Attr("seed: int");
GRADCOMP_DECODE_OP("QsgdDecode").Attr("bits: list(int)").Attr("bucket_size: int");
GRADCOMP_PUT_BACK_OP("QsgdPutBack").Attr("bits: list(int)").Attr("bucket_size: int");

REGISTER_KERNEL_BUILDER(Name("QsgdEncode").Device(DEVICE_CPU),
                        FixedLengthEncodeOp<QsgdOpSettings>);
REGISTER_KERNEL_BUILDER(Name("QsgdDecode").Device(DEVICE_CPU),
                        FixedLengthDecodeOp<QsgdOpSettings>);
REGISTER_KERNEL_BUILDER(Name("QsgdPutBack").Device(DEVICE_CPU),
                        FixedLengthPutBackOp<QsgdOpSettings>);

}  // namespace
}  // namespace gradcomp
