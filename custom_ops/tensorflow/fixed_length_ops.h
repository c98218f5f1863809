// The ops of methods whose payloads have a fixed length: <Method>Encode, <Method>Decode and
// <Method>PutBack. A method registers them by the macros below, and has a class of settings:
//
//   struct Settings {
//     static constexpr Method kMethod;
//     static constexpr bool kDependsOnReplica;  // then Encode has an input `replica`, its number
//     absl::Status Read(OpKernelConstruction* context, int num_tensors);  // its attributes
//     std::unique_ptr<const Codec> NewCodec(int tensor, int64_t size) const;
//   };
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_OPS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_OPS_H_

#include <optional>
#include <vector>

#include "../kernels/fixed_length.h"
#include "../kernels/payload.h"
#include "op_support.h"
#include "shape_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

template <typename Settings>
class FixedLengthEncodeOp : public tensorflow::OpKernel {
 public:
  explicit FixedLengthEncodeOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    constexpr int kOwnInputs = Settings::kDependsOnReplica ? 2 : 1;
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, kOwnInputs));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, settings_.Read(context, num_tensors_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    Sender sender = {Settings::kMethod, fingerprint_, 0, 0};
    OP_REQUIRES_OK(context, GetScalar(context, 2 * num_tensors_, "step", &sender.step));
    if constexpr (Settings::kDependsOnReplica) {
      OP_REQUIRES_OK(context, GetScalar(context, 2 * num_tensors_ + 1, "replica", &sender.replica));
    }
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, residuals.Lock(context, num_tensors_));
    OP_REQUIRES_OK(context, CheckGradientShapes(context, residuals, num_tensors_));

    Codecs codecs;
    for (int i = 0; i < num_tensors_; ++i) {
      codecs.push_back(settings_.NewCodec(i, residuals.shape(i).num_elements()));
    }
    tensorflow::Tensor* payload;
    tensorflow::Tensor* tensor_bytes;
    OP_REQUIRES_OK(context, context->allocate_output(0, {PayloadWords(codecs)}, &payload));
    OP_REQUIRES_OK(context, context->allocate_output(1, {num_tensors_}, &tensor_bytes));
    OP_REQUIRES_OK(context, residuals.Unshare(context));

    std::vector<Source> sources;
    for (int i = 0; i < num_tensors_; ++i) {
      const tensorflow::Tensor& gradient = context->input(num_tensors_ + i);
      sources.push_back({residuals.data(i), gradient.data(), ToGradientType(gradient.dtype())});
      tensor_bytes->flat<int64_t>()(i) = 4 * codecs[i]->words();
    }
    EncodeFixedLength(codecs, sources, sender, ThreadPool(context),
                      payload->flat<int32_t>().data());
  }

 private:
  int num_tensors_;
  int64_t fingerprint_;
  Settings settings_;
};

template <typename Settings>
class FixedLengthDecodeOp : public tensorflow::OpKernel {
 public:
  explicit FixedLengthDecodeOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    int num_tensors;
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    OP_REQUIRES(context, shapes_.size() == num_tensors,
                InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors,
                                ": give one shape for each tensor"));
    Settings settings;
    OP_REQUIRES_OK(context, settings.Read(context, num_tensors));
    for (int i = 0; i < num_tensors; ++i) {
      codecs_.push_back(settings.NewCodec(i, shapes_[i].num_elements()));
    }
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& payloads = context->input(0);
    int64_t step;
    OP_REQUIRES_OK(context, GetScalar(context, 1, "step", &step));
    OP_REQUIRES_OK(context, CheckRows(payloads));
    FixedLengthDecoder decoder(codecs_, Settings::kMethod, fingerprint_, ThreadPool(context));
    OP_REQUIRES_OK(context, ToTensorFlow(decoder.Read(payloads.flat<int32_t>().data(),
                                                      payloads.dim_size(0), payloads.dim_size(1),
                                                      step)));
    std::vector<float*> outputs;
    for (int i = 0; i < codecs_.size(); ++i) {
      tensorflow::Tensor* output;
      OP_REQUIRES_OK(context, context->allocate_output(i, shapes_[i], &output));
      outputs.push_back(output->flat<float>().data());
    }
    tensorflow::Tensor* finite;
    OP_REQUIRES_OK(context, context->allocate_output(codecs_.size(), {}, &finite));
    finite->scalar<bool>()() = decoder.Reduce(outputs);
  }

 private:
  int64_t fingerprint_;
  std::vector<tensorflow::TensorShape> shapes_;
  Codecs codecs_;
};

template <typename Settings>
class FixedLengthPutBackOp : public tensorflow::OpKernel {
 public:
  explicit FixedLengthPutBackOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, settings_.Read(context, num_tensors_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& payload = context->input(num_tensors_);
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, residuals.Lock(context, num_tensors_));
    Codecs codecs;
    for (int i = 0; i < num_tensors_; ++i) {
      codecs.push_back(settings_.NewCodec(i, residuals.shape(i).num_elements()));
    }
    FixedLengthDecoder decoder(codecs, Settings::kMethod, fingerprint_, ThreadPool(context));
    OP_REQUIRES_OK(context, ToTensorFlow(decoder.Read(payload.flat<int32_t>().data(), 1,
                                                      payload.NumElements(), std::nullopt)));
    OP_REQUIRES_OK(context, residuals.Unshare(context));
    std::vector<float*> values;
    for (int i = 0; i < num_tensors_; ++i) values.push_back(residuals.data(i));
    decoder.AddTo(values);
  }

 private:
  int num_tensors_;
  int64_t fingerprint_;
  Settings settings_;
};

}  // namespace gradcomp

// Each takes the method's own inputs and attributes behind it.
#define GRADCOMP_ENCODE_OP(name)                                     \
  REGISTER_OP(name)                                                  \
      .Input("residuals: N * resource")                              \
      .Input("gradients: Tgradients")                                \
      .Input("step: int64")                                          \
      .Output("payload: int32")                                      \
      .Output("tensor_bytes: int64")                                 \
      .Attr("N: int >= 1")                                           \
      .Attr("Tgradients: list({float, half, bfloat16}) >= 1")        \
      .Attr("fingerprint: int")                                      \
      .SetIsStateful()                                               \
      .SetShapeFn(EncodeShape)

#define GRADCOMP_DECODE_OP(name)       \
  REGISTER_OP(name)                    \
      .Input("payloads: int32")        \
      .Input("step: int64")            \
      .Output("reduced: N * float")    \
      .Output("finite: bool")          \
      .Attr("N: int >= 1")             \
      .Attr("shapes: list(shape)")     \
      .Attr("fingerprint: int")        \
      .SetShapeFn(DecodeShape)

#define GRADCOMP_PUT_BACK_OP(name)            \
  REGISTER_OP(name)                           \
      .Input("residuals: N * resource")       \
      .Input("payload: int32")                \
      .Attr("N: int >= 1")                    \
      .Attr("fingerprint: int")               \
      .SetIsStateful()                        \
      .SetShapeFn(PutBackShape)

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_OPS_H_
