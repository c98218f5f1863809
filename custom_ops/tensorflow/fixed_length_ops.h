// The ops of methods whose payloads have a fixed length: <Method>Encode, <Method>Decode and
// <Method>PutBack. A method registers them by the macros below, and has a class of settings:
//
//   struct Settings {
//     static constexpr Method kMethod;
//     static constexpr bool kDependsOnReplica;  // then Encode has an input `replica`, its number
//     static constexpr const char* kMain;  // the last input, a setting of each tensor; null: none
//     static Status Check(const std::vector<int64_t>& main, int64_t num_tensors);
//     absl::Status Read(OpKernelConstruction* context);  // attributes
//     std::unique_ptr<const Codec> NewCodec(int64_t size, int64_t main) const;
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
class FixedLengthOp : public tensorflow::OpKernel {
 public:
  explicit FixedLengthOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, settings_.Read(context));
  }

 protected:
  static constexpr int kMainInputs = Settings::kMain == nullptr ? 0 : 1;

  // The main settings, which are the last input; of a method without, an empty list.
  absl::Status GetMain(tensorflow::OpKernelContext* context, std::vector<int64_t>* main) const {
    if constexpr (kMainInputs == 0) {
      return absl::OkStatus();
    } else {
      TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, Settings::kMain, main));
      return ToTensorFlow(Settings::Check(*main, num_tensors_));
    }
  }

  // `shapes` has .shape(i) of each tensor.
  template <typename Shapes>
  Codecs NewCodecs(const std::vector<int64_t>& main, const Shapes& shapes) const {
    Codecs codecs;
    for (int i = 0; i < num_tensors_; ++i) {
      const int64_t of_tensor = kMainInputs == 0 ? 0 : main[i];
      codecs.push_back(settings_.NewCodec(shapes.shape(i).num_elements(), of_tensor));
    }
    return codecs;
  }

  FixedLengthDecoder NewDecoder(tensorflow::OpKernelContext* context, const Codecs& codecs,
                                const std::vector<int64_t>& main) const {
    return FixedLengthDecoder(codecs, Settings::kMethod, fingerprint_, PlanOf(main),
                              ThreadPool(context));
  }

  int num_tensors_;
  int64_t fingerprint_;

 private:
  Settings settings_;
};

template <typename Settings>
class FixedLengthEncodeOp : public FixedLengthOp<Settings> {
 public:
  explicit FixedLengthEncodeOp(tensorflow::OpKernelConstruction* context)
      : FixedLengthOp<Settings>(context) {
    constexpr int kOwnInputs = (Settings::kDependsOnReplica ? 2 : 1) + Base::kMainInputs;
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, kOwnInputs));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    std::vector<int64_t> main;
    OP_REQUIRES_OK(context, this->GetMain(context, &main));
    Sender sender = {Settings::kMethod, this->fingerprint_, PlanOf(main), 0, 0};
    OP_REQUIRES_OK(context, GetScalar(context, 2 * num_tensors_, "step", &sender.step));
    if constexpr (Settings::kDependsOnReplica) {
      OP_REQUIRES_OK(context, GetScalar(context, 2 * num_tensors_ + 1, "replica", &sender.replica));
    }
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, residuals.Lock(context, num_tensors_));
    OP_REQUIRES_OK(context, CheckGradientShapes(context, residuals, num_tensors_));

    const Codecs codecs = this->NewCodecs(main, residuals);
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
  using Base = FixedLengthOp<Settings>;
  using Base::num_tensors_;
};

template <typename Settings>
class FixedLengthDecodeOp : public FixedLengthOp<Settings> {
 public:
  explicit FixedLengthDecodeOp(tensorflow::OpKernelConstruction* context)
      : FixedLengthOp<Settings>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    OP_REQUIRES(context, static_cast<int>(shapes_.size()) == num_tensors_,
                InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors_,
                                ": give one shape for each tensor"));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& payloads = context->input(0);
    int64_t step;
    OP_REQUIRES_OK(context, GetScalar(context, 1, "step", &step));
    OP_REQUIRES_OK(context, CheckRows(payloads));
    std::vector<int64_t> main;
    OP_REQUIRES_OK(context, this->GetMain(context, &main));
    const Codecs codecs = this->NewCodecs(main, *this);
    FixedLengthDecoder decoder = this->NewDecoder(context, codecs, main);
    OP_REQUIRES_OK(context, ToTensorFlow(decoder.Read(payloads.flat<int32_t>().data(),
                                                      payloads.dim_size(0), payloads.dim_size(1),
                                                      step)));
    std::vector<float*> outputs;
    for (int i = 0; i < num_tensors_; ++i) {
      tensorflow::Tensor* output;
      OP_REQUIRES_OK(context, context->allocate_output(i, shapes_[i], &output));
      outputs.push_back(output->flat<float>().data());
    }
    tensorflow::Tensor* finite;
    OP_REQUIRES_OK(context, context->allocate_output(num_tensors_, {}, &finite));
    finite->scalar<bool>()() = decoder.Reduce(outputs);
  }

  const tensorflow::TensorShape& shape(int i) const { return shapes_[i]; }

 private:
  using FixedLengthOp<Settings>::num_tensors_;
  std::vector<tensorflow::TensorShape> shapes_;
};

template <typename Settings>
class FixedLengthPutBackOp : public FixedLengthOp<Settings> {
 public:
  using FixedLengthOp<Settings>::FixedLengthOp;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& payload = context->input(num_tensors_);
    std::vector<int64_t> main;
    OP_REQUIRES_OK(context, this->GetMain(context, &main));
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, residuals.Lock(context, num_tensors_));
    const Codecs codecs = this->NewCodecs(main, residuals);
    FixedLengthDecoder decoder = this->NewDecoder(context, codecs, main);
    OP_REQUIRES_OK(context, ToTensorFlow(decoder.Read(payload.flat<int32_t>().data(), 1,
                                                      payload.NumElements(), std::nullopt)));
    OP_REQUIRES_OK(context, residuals.Unshare(context));
    std::vector<float*> values;
    for (int i = 0; i < num_tensors_; ++i) values.push_back(residuals.data(i));
    decoder.AddTo(values);
  }

 private:
  using FixedLengthOp<Settings>::num_tensors_;
};

}  // namespace gradcomp

// Each takes the method's own inputs and attributes behind it, the main settings last of the inputs,
// and then EncodeShape, DecodeShape or PutBackShape, with settings in WithSettings.
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
      .SetIsStateful()

#define GRADCOMP_DECODE_OP(name)       \
  REGISTER_OP(name)                    \
      .Input("payloads: int32")        \
      .Input("step: int64")            \
      .Output("reduced: N * float")    \
      .Output("finite: bool")          \
      .Attr("N: int >= 1")             \
      .Attr("shapes: list(shape)")     \
      .Attr("fingerprint: int")

#define GRADCOMP_PUT_BACK_OP(name)            \
  REGISTER_OP(name)                           \
      .Input("residuals: N * resource")       \
      .Input("payload: int32")                \
      .Attr("N: int >= 1")                    \
      .Attr("fingerprint: int")               \
      .SetIsStateful()

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_OPS_H_
