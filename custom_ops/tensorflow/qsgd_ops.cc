// QSGD's ops, documented in tf_gradcomp/ops/quantization.py.
#include <cstdint>
#include <memory>
#include <vector>

#include "../gpu/qsgd_on_gpu.h"
#include "../kernels/qsgd_codec.h"
#include "../kernels/whole_codec.h"
#include "fixed_length_ops.h"

namespace gradcomp {
namespace {

Status CheckBits(const std::vector<int64_t>& bits, int64_t num_tensors) {
  if (static_cast<int64_t>(bits.size()) != num_tensors) {
    return {Concat("bits has ", bits.size(), " entries; expected ", num_tensors,
                   ": give one number of bits for each tensor")};
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    if (bits[i] == 0 || (bits[i] >= kMinQsgdBits && bits[i] <= kMaxQsgdBits)) continue;
    return {Concat("bits[", i, "] is ", bits[i], "; expected ", kMinQsgdBits, " to ",
                   kMaxQsgdBits, ", or 0 to send the tensor whole")};
  }
  return {};
}

absl::Status CheckBucketSize(int64_t size) {
  if (size > 0 && size <= kMaxBucketSize && size % kBucketStep == 0) return absl::OkStatus();
  return InvalidArgument("bucket_size is ", size, "; expected a multiple of ", kBucketStep,
                         " up to ", kMaxBucketSize);
}

class QsgdOpSettings : public FixedLengthMethod<Method::kQsgd> {
 public:
  static constexpr bool kDependsOnReplica = true;
  static constexpr const char* kMain = "bits";
  static constexpr auto kCheck = CheckBits;
  static constexpr auto kEncodeOnGpu = EncodeQsgdOnGpu;
  static constexpr auto DecodeOnGpu = DecodeQsgdOnGpu;

  absl::Status Read(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("bucket_size", &bucket_size_));
    return CheckBucketSize(bucket_size_);
  }

  std::unique_ptr<const Codec> NewCodec(int64_t size, int64_t bits) const {
    if (bits == 0) return std::make_unique<WholeCodec>(size);
    const QsgdSettings settings = {static_cast<int>(bits), bucket_size_};
    return std::make_unique<QsgdCodec>(size, settings);
  }

 private:
  int64_t bucket_size_;
};

class QsgdErrorsOp : public OpKernel {
 public:
  explicit QsgdErrorsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket_size", &bucket_size_));
    OP_REQUIRES_OK(context, CheckBucketSize(bucket_size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(0);
    std::vector<int64_t> bits;
    OP_REQUIRES_OK(context, GetSettings(context, 1, "bits", &bits));
    OP_REQUIRES_OK(context, ToTensorFlow(CheckBits(bits, bits.size())));
    Tensor* errors;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(1).shape(), &errors));
    for (size_t i = 0; i < bits.size(); ++i) {
      const QsgdSettings settings = {static_cast<int>(bits[i]), bucket_size_};
      errors->flat<double>()(i) =
          bits[i] == 0 ? 0
                       : QsgdError(values.flat<float>().data(), values.NumElements(), settings,
                                   ThreadPool(context));
    }
  }

 private:
  int64_t bucket_size_;
};

absl::Status QsgdErrorsShape(InferenceContext* c) {
  c->set_output(0, c->input(1));
  return absl::OkStatus();
}

absl::Status QsgdEncodeShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(EncodeShape(c));
  ShapeHandle unused;
  return c->WithRank(c->input(c->num_inputs() - 2), 0, &unused);  // the replica's number
}

GRADCOMP_ENCODE_OP("QsgdEncode")
    .Input("replica: int64")
    .Input("bits: int64")
    .Attr("bucket_size: int")
    .SetShapeFn(WithSettings<CheckBits, QsgdEncodeShape>);
GRADCOMP_DECODE_OP("QsgdDecode")
    .Input("bits: int64")
    .Attr("bucket_size: int")
    .SetShapeFn(WithSettings<CheckBits, DecodeShape>);
GRADCOMP_PUT_BACK_OP("QsgdPutBack")
    .Input("bits: int64")
    .Attr("bucket_size: int")
    .SetShapeFn(WithSettings<CheckBits, PutBackShape>);
REGISTER_OP("QsgdErrors")
    .Input("values: float")
    .Input("bits: int64")
    .Output("errors: double")
    .Attr("bucket_size: int")
    .SetShapeFn(QsgdErrorsShape);

GRADCOMP_FIXED_LENGTH_KERNELS("Qsgd", QsgdOpSettings, .HostMemory("replica").HostMemory("bits"),
                              .HostMemory("bits"));
REGISTER_KERNEL_BUILDER(Name("QsgdErrors").Device(DEVICE_CPU), QsgdErrorsOp);

}  // namespace
}  // namespace gradcomp
