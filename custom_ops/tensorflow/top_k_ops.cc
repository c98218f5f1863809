// TopK's ops, documented in tf_gradcomp/ops/sparsification.py.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "../gpu/top_k_on_gpu.h"
#include "../kernels/momentum.h"
#include "../kernels/top_k_codec.h"
#include "../kernels/whole_codec.h"
#include "fixed_length_ops.h"
#include "tensorflow/core/framework/common_shape_fns.h"

namespace gradcomp {
namespace {

Status CheckEntries(const std::vector<int64_t>& entries, int64_t num_tensors) {
  if (static_cast<int64_t>(entries.size()) != num_tensors) {
    return {Concat("entries has ", entries.size(), " entries; expected ", num_tensors,
                   ": give one number for each tensor")};
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    if (entries[i] >= 0) continue;
    return {Concat("entries[", i, "] is ", entries[i],
                   "; expected 1 or more, or 0 to send the tensor whole")};
  }
  return {};
}

struct TopKSettings : FixedLengthMethod<Method::kTopK> {
  static constexpr const char* kMain = "entries";
  static constexpr auto kCheck = CheckEntries;
  static constexpr auto kEncodeOnGpu = EncodeTopKOnGpu;
  static constexpr auto DecodeOnGpu = DecodeTopKOnGpu;

  std::unique_ptr<const Codec> NewCodec(int64_t size, int64_t entries) const {
    if (entries == 0) return std::make_unique<WholeCodec>(size);
    return std::make_unique<TopKCodec>(size, std::min(size, entries));
  }
};

class MomentumCorrectionOp : public OpKernel {
 public:
  explicit MomentumCorrectionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("momentum", &momentum_));
    OP_REQUIRES_OK(context, context->GetAttr("clip_norm", &clip_norm_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList velocities;
    OpInputList gradients;
    OpOutputList corrected;
    OP_REQUIRES_OK(context, context->input_list("velocities", &velocities));
    OP_REQUIRES_OK(context, context->input_list("gradients", &gradients));
    OP_REQUIRES_OK(context, context->output_list("corrected", &corrected));
    OP_REQUIRES(context, velocities.size() == 0 || velocities.size() == gradients.size(),
                InvalidArgument(velocities.size(), " velocities for ", gradients.size(),
                                " gradients; expected one for each gradient, or none"));
    std::vector<MomentumTensor> tensors;
    for (int i = 0; i < gradients.size(); ++i) {
      const Tensor& gradient = gradients[i];
      const float* velocity = nullptr;
      if (velocities.size() > 0) {
        OP_REQUIRES(context, velocities[i].shape() == gradient.shape(),
                    InvalidArgument("velocity ", i, " has shape ",
                                    velocities[i].shape().DebugString(), "; expected ",
                                    gradient.shape().DebugString(), ", the shape of its gradient"));
        velocity = velocities[i].flat<float>().data();
      }
      Tensor* output;
      OP_REQUIRES_OK(context, corrected.allocate(i, gradient.shape(), &output));
      tensors.push_back({velocity, gradient.data(), ToGradientType(gradient.dtype()),
                         gradient.NumElements(), output->flat<float>().data()});
    }
    const ParallelFor parallel_for = ThreadPool(context);
    const float scale = ClipScale(tensors, clip_norm_, parallel_for);
    CorrectMomentum(tensors, scale, momentum_, parallel_for);
  }

 private:
  float momentum_;
  float clip_norm_;
};

// Stores the corrected gradients as velocities, and zeros for sent entries (Lin et al. 2018,
// section 3.3, momentum factor masking). Discards gradients that are not finite.
class TopKKeepVelocityInputs : public PutBackInputs<TopKSettings> {
 public:
  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(ReadFrom(context, /*payload_input=*/2 * num_tensors_, step));
    return CheckGradientShapes(context, step->residuals, num_tensors_);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    bool sent = false;
    TF_RETURN_IF_ERROR(GetScalar(context, 2 * num_tensors_ + 1, "sent", &sent));
    if (!step->decoder->finite()) return absl::OkStatus();
    LockedResiduals& velocities = step->residuals;
    TF_RETURN_IF_ERROR(velocities.Unshare(context));
    for (int i = 0; i < num_tensors_; ++i) {
      float* velocity = velocities.data(i);
      const float* corrected = context->input(num_tensors_ + i).flat<float>().data();
      ThreadPool(context)(step->codecs[i]->size(), 1, [=](int64_t begin, int64_t end) {
        std::memcpy(velocity + begin, corrected + begin, (end - begin) * sizeof(float));
      });
      // A tensor that is sent whole is never delayed, and keeps its velocity.
      const auto* codec = dynamic_cast<const TopKCodec*>(step->codecs[i].get());
      if (sent && codec) codec->ClearSent(step->decoder->WordsOf(0, i), velocity);
    }
    return absl::OkStatus();
  }
};

absl::Status MomentumCorrectionShape(InferenceContext* c) {
  int num_velocities;
  int num_gradients = c->num_outputs();
  TF_RETURN_IF_ERROR(c->GetAttr("M", &num_velocities));
  for (int i = 0; i < num_gradients; ++i) {
    ShapeHandle shape = c->input(num_velocities + i);
    if (num_velocities == num_gradients) TF_RETURN_IF_ERROR(c->Merge(c->input(i), shape, &shape));
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

GRADCOMP_ENCODE_OP("TopKEncode")
    .Input("entries: int64")
    .SetShapeFn(WithSettings<CheckEntries, EncodeShape>);
GRADCOMP_DECODE_OP("TopKDecode")
    .Input("entries: int64")
    .SetShapeFn(WithSettings<CheckEntries, DecodeShape>);
GRADCOMP_PUT_BACK_OP("TopKPutBack")
    .Input("entries: int64")
    .SetShapeFn(WithSettings<CheckEntries, PutBackShape>);

REGISTER_OP("MomentumCorrection")
    .Input("velocities: M * float")
    .Input("gradients: Tgradients")
    .Output("corrected: N * float")
    .Attr("M: int >= 0")
    .Attr("N: int >= 1")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("momentum: float")
    .Attr("clip_norm: float")
    .SetShapeFn(MomentumCorrectionShape);

REGISTER_OP("TopKKeepVelocity")
    .Input("velocities: N * resource")
    .Input("corrected: N * float")
    .Input("payload: int32")
    .Input("sent: bool")
    .Input("entries: int64")
    .Attr("N: int >= 1")
    .Attr("fingerprint: int")
    .SetIsStateful()
    .SetShapeFn(WithSettings<CheckEntries, tensorflow::shape_inference::NoOutputs>);

GRADCOMP_FIXED_LENGTH_KERNELS("TopK", TopKSettings, .HostMemory("entries"),
                              .HostMemory("entries"));
REGISTER_KERNEL_BUILDER(Name("MomentumCorrection").Device(DEVICE_CPU), MomentumCorrectionOp);
REGISTER_KERNEL_BUILDER(Name("TopKKeepVelocity").Device(DEVICE_CPU),
                        OpOnHost<TopKKeepVelocityInputs>);

}  // namespace
}  // namespace gradcomp
