#include <memory>
#include <optional>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/payload.h"
#include "adam_support.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// The last input of each op.
absl::Status GetBinSizes(OpKernelContext* context, int num_tensors,
                         std::vector<int64_t>* bin_sizes) {
  TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, "bin_sizes", bin_sizes));
  return ToTensorFlow(CheckBinSizes(*bin_sizes, num_tensors));
}

class AdaCompEncodeOp : public OpKernel {
 public:
  explicit AdaCompEncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, context->GetAttr("scale_factor", &scale_factor_));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, context->GetAttr("M", &num_moments_));
    OP_REQUIRES_OK(context, squares_.Read(context, num_tensors_));
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_,
                                                 num_moments_ + 3 + squares_.size()));
    if (num_moments_ == 0) return;
    OP_REQUIRES(context, num_moments_ == num_tensors_,
                InvalidArgument(num_moments_, " second moments for ", num_tensors_,
                                " residuals; expected one for each residual, or none"));
    OP_REQUIRES_OK(context, adam_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    int64_t step;
    OP_REQUIRES_OK(context, GetScalar(context, 2 * num_tensors_, "step", &step));
    std::vector<int64_t> bin_sizes;
    OP_REQUIRES_OK(context, GetBinSizes(context, num_tensors_, &bin_sizes));
    AdamSettings adam{};
    if (num_moments_ > 0) {
      const int adam_step = 2 * num_tensors_ + 1 + num_moments_;
      OP_REQUIRES_OK(context, adam_.At(context, adam_step, "adam_step", &adam));
    }
    LockedResiduals variables;  // residuals, then second moments
    OP_REQUIRES_OK(context, variables.Lock(context, {{0, num_tensors_, "residual"},
                                                     {2 * num_tensors_ + 1, num_moments_,
                                                      "second moment"}}));
    OP_REQUIRES_OK(context, CheckGradientShapes(context, variables, num_tensors_));
    OP_REQUIRES_OK(context, CheckMomentShapes(variables));
    OP_REQUIRES_OK(context, variables.Unshare(context));
    std::vector<EncoderTensor> tensors;
    OP_REQUIRES_OK(context, GetTensors(context, variables, bin_sizes, &tensors));

    AdaCompEncoder encoder(tensors, scale_factor_, ThreadPool(context), BestSimd(), adam);
    PayloadHeader header;
    header.method = static_cast<uint16_t>(Method::kAdaComp);
    header.fingerprint = fingerprint_;
    header.plan = PlanOf(bin_sizes);
    header.step = step;
    header.num_tensors = num_tensors_;
    header.flags = encoder.Run() ? 0 : kNonFiniteFlag;
    header.length = kHeaderWords + encoder.body_words();
    const absl::Status status = Write(context, header, &encoder);
    if (!status.ok()) encoder.Rollback();
    OP_REQUIRES_OK(context, status);
  }

 private:
  absl::Status CheckMomentShapes(const LockedResiduals& variables) const {
    for (int i = 0; i < num_moments_; ++i) {
      const TensorShape& shape = variables.shape(num_tensors_ + i);
      if (shape == variables.shape(i)) continue;
      return InvalidArgument("second moment ", i, " has shape ", shape.DebugString(),
                             "; expected ", variables.shape(i).DebugString(),
                             ", that of its residual");
    }
    return absl::OkStatus();
  }

  absl::Status GetTensors(OpKernelContext* context, const LockedResiduals& variables,
                          const std::vector<int64_t>& bin_sizes,
                          std::vector<EncoderTensor>* tensors) const {
    const int first_squares = 2 * num_tensors_ + num_moments_ + 2;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      const float* squares;
      TF_RETURN_IF_ERROR(squares_.At(context, first_squares, i, gradient.shape(), &squares));
      tensors->push_back({variables.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                          gradient.NumElements(), bin_sizes[i],
                          num_moments_ > 0 ? variables.data(num_tensors_ + i) : nullptr, squares});
    }
    return absl::OkStatus();
  }

  absl::Status Write(OpKernelContext* context, const PayloadHeader& header,
                     AdaCompEncoder* encoder) const {
    Tensor* payload;
    Tensor* tensor_bytes;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({header.length}), &payload));
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({num_tensors_}), &tensor_bytes));
    int32_t* words = payload->flat<int32_t>().data();
    if (!header.non_finite()) encoder->WriteBody(words + kHeaderWords);
    WriteHeader(header, words);
    const std::vector<int64_t> bytes = encoder->TensorBytes();
    std::copy(bytes.begin(), bytes.end(), tensor_bytes->flat<int64_t>().data());
    return absl::OkStatus();
  }

  int num_tensors_;
  float scale_factor_;
  int64_t fingerprint_;
  int num_moments_;
  AdamAttributes adam_;
  SquaresInputs squares_;
};

class AdaCompDecodeOp : public OpKernel {
 public:
  explicit AdaCompDecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    int64_t num_tensors;
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    OP_REQUIRES(context, static_cast<int64_t>(shapes_.size()) == num_tensors,
                InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors,
                                ": give one shape for each tensor"));
    for (int64_t i = 0; i < num_tensors; ++i) {
      OP_REQUIRES_OK(context, ToTensorFlow(CheckTensorSize(i, shapes_[i].num_elements())));
    }
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& payloads = context->input(0);
    int64_t step;
    OP_REQUIRES_OK(context, GetScalar(context, 1, "step", &step));
    OP_REQUIRES_OK(context, CheckRows(payloads));
    const int num_tensors = static_cast<int>(shapes_.size());
    std::vector<int64_t> bin_sizes;
    OP_REQUIRES_OK(context, GetBinSizes(context, num_tensors, &bin_sizes));
    std::vector<DecoderTensor> tensors;
    for (int i = 0; i < num_tensors; ++i) {
      tensors.push_back({shapes_[i].num_elements(), bin_sizes[i]});
    }
    AdaCompDecoder decoder(tensors, fingerprint_, ThreadPool(context));
    OP_REQUIRES_OK(context,
                   ToTensorFlow(decoder.Read(payloads.flat<int32_t>().data(),
                                             payloads.dim_size(0), payloads.dim_size(1), step)));
    OpOutputList reduced;
    OP_REQUIRES_OK(context, context->output_list("reduced", &reduced));
    std::vector<float*> outputs;
    for (int i = 0; i < num_tensors; ++i) {
      Tensor* output;
      OP_REQUIRES_OK(context, reduced.allocate(i, shapes_[i], &output));
      outputs.push_back(output->flat<float>().data());
    }
    Tensor* finite;
    OP_REQUIRES_OK(context, context->allocate_output(num_tensors, TensorShape({}), &finite));
    finite->scalar<bool>()() = decoder.Reduce(outputs);
  }

 private:
  int64_t fingerprint_;
  std::vector<TensorShape> shapes_;
};

class AdaCompPutBackOp : public OpKernel {
 public:
  explicit AdaCompPutBackOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& payload = context->input(num_tensors_);
    std::vector<int64_t> bin_sizes;
    OP_REQUIRES_OK(context, GetBinSizes(context, num_tensors_, &bin_sizes));
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, residuals.Lock(context, num_tensors_));
    std::vector<DecoderTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      tensors.push_back({residuals.shape(i).num_elements(), bin_sizes[i]});
    }
    AdaCompDecoder decoder(tensors, fingerprint_, ThreadPool(context));
    OP_REQUIRES_OK(context, ToTensorFlow(decoder.Read(payload.flat<int32_t>().data(), 1,
                                                      payload.NumElements(), std::nullopt)));
    if (!decoder.finite()) return;
    OP_REQUIRES_OK(context, residuals.Unshare(context));
    std::vector<float*> values;
    for (int i = 0; i < num_tensors_; ++i) values.push_back(residuals.data(i));
    decoder.AddTo(values);
  }

 private:
  int num_tensors_;
  int64_t fingerprint_;
};

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode").Device(DEVICE_CPU), AdaCompEncodeOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode").Device(DEVICE_CPU), AdaCompDecodeOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack").Device(DEVICE_CPU), AdaCompPutBackOp);

}  // namespace
}  // namespace gradcomp
