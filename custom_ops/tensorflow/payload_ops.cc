// Ops for the header of payloads, for methods that write payloads in plain TensorFlow.
// tf_gradcomp/ops/payload.py documents the ops.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/payload.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

class PayloadOp : public OpKernel {
 public:
  explicit PayloadOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("method", &method_));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, context->GetAttr("num_tensors", &num_tensors_));
    OP_REQUIRES_OK(context, context->GetAttr("same_length", &same_length_));
  }

 protected:
  int64_t NumTensors(const std::vector<int64_t>& settings) const {
    return num_tensors_ < 0 ? settings.size() : num_tensors_;
  }

  int64_t method_;
  int64_t fingerprint_;
  int64_t num_tensors_;  // for a method without settings; otherwise negative
  bool same_length_;     // whether the payloads of all replicas are equally long
};

class PayloadWriteOp : public PayloadOp {
 public:
  using PayloadOp::PayloadOp;

  void Compute(OpKernelContext* context) override {
    const Tensor& body = context->input(0);
    OP_REQUIRES(context, TensorShapeUtils::IsVector(body.shape()),
                InvalidArgument("body has shape ", body.shape().DebugString(),
                                "; expected a vector of words"));
    PayloadHeader header;
    bool finite = false;
    std::vector<int64_t> settings;
    OP_REQUIRES_OK(context, GetScalar(context, 1, "step", &header.step));
    OP_REQUIRES_OK(context, GetScalar(context, 2, "finite", &finite));
    OP_REQUIRES_OK(context, GetSettings(context, 3, "settings", &settings));
    header.method = static_cast<uint16_t>(method_);
    header.fingerprint = fingerprint_;
    header.plan = PlanOf(settings);
    header.flags = finite ? 0 : kNonFiniteFlag;
    header.num_tensors = NumTensors(settings);
    const int64_t body_words = finite || same_length_ ? body.NumElements() : 0;
    header.length = kHeaderWords + body_words;
    Tensor* payload;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({header.length}), &payload));
    int32_t* words = payload->flat<int32_t>().data();
    if (finite) {
      std::copy_n(body.flat<int32_t>().data(), body_words, words + kHeaderWords);
    } else {
      std::fill_n(words + kHeaderWords, body_words, 0);
    }
    WriteHeader(header, words);
  }
};

class PayloadReadOp : public PayloadOp {
 public:
  using PayloadOp::PayloadOp;

  void Compute(OpKernelContext* context) override {
    const Tensor& payloads = context->input(0);
    OP_REQUIRES_OK(context, CheckRows(payloads));
    int64_t step;
    std::vector<int64_t> settings;
    OP_REQUIRES_OK(context, GetScalar(context, 1, "step", &step));
    OP_REQUIRES_OK(context, GetSettings(context, 2, "settings", &settings));
    std::vector<PayloadView> views;
    OP_REQUIRES_OK(context, ToTensorFlow(ReadRows(payloads.flat<int32_t>().data(),
                                                  payloads.dim_size(0), payloads.dim_size(1),
                                                  &views)));
    ExpectedHeader expected = {static_cast<Method>(method_), fingerprint_, PlanOf(settings), step,
                               NumTensors(settings)};
    if (same_length_) expected.length = payloads.dim_size(1);
    const int64_t body_words = payloads.dim_size(1) - kHeaderWords;
    Tensor* bodies;
    Tensor* finite;
    Tensor* lengths;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {payloads.dim_size(0), body_words}, &bodies));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &finite));
    OP_REQUIRES_OK(context, context->allocate_output(2, {payloads.dim_size(0)}, &lengths));
    finite->scalar<bool>()() = true;
    int32_t* to = bodies->flat<int32_t>().data();
    for (size_t i = 0; i < views.size(); ++i) {
      OP_REQUIRES_OK(context, ToTensorFlow(OfReplica(i, CheckHeader(views[i], expected))));
      if (views[i].header.non_finite()) finite->scalar<bool>()() = false;
      lengths->vec<int64_t>()(i) = views[i].body_words();
      to = std::copy_n(views[i].body(), body_words, to);  // zeros follow: see ReadRows
    }
  }
};

// Sets output 0 to the shape of input 0, with `more` additional words on the last axis.
absl::Status Lengthened(InferenceContext* c, int rank, int64_t more) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), rank, &shape));
  DimensionHandle words;
  TF_RETURN_IF_ERROR(more > 0 ? c->Add(c->Dim(shape, -1), more, &words)
                              : c->Subtract(c->Dim(shape, -1), -more, &words));
  TF_RETURN_IF_ERROR(c->ReplaceDim(shape, -1, words, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

REGISTER_OP("PayloadWrite")
    .Input("body: int32")
    .Input("step: int64")
    .Input("finite: bool")
    .Input("settings: int64")
    .Output("payload: int32")
    .Attr("method: int")
    .Attr("fingerprint: int")
    .Attr("num_tensors: int = -1")
    .Attr("same_length: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      bool same_length;
      TF_RETURN_IF_ERROR(c->GetAttr("same_length", &same_length));
      if (same_length) return Lengthened(c, 1, kHeaderWords);
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

REGISTER_OP("PayloadRead")
    .Input("payloads: int32")
    .Input("step: int64")
    .Input("settings: int64")
    .Output("bodies: int32")
    .Output("finite: bool")
    .Output("lengths: int64")
    .Attr("method: int")
    .Attr("fingerprint: int")
    .Attr("num_tensors: int = -1")
    .Attr("same_length: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle payloads;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &payloads));
      c->set_output(1, c->Scalar());
      c->set_output(2, c->Vector(c->Dim(payloads, 0)));
      return Lengthened(c, 2, -kHeaderWords);
    });

REGISTER_KERNEL_BUILDER(Name("PayloadWrite").Device(DEVICE_CPU), PayloadWriteOp);
REGISTER_KERNEL_BUILDER(Name("PayloadRead").Device(DEVICE_CPU), PayloadReadOp);

}  // namespace
}  // namespace gradcomp
