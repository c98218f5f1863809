#include "adacomp_inputs.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "../kernels/adacomp_layout.h"

namespace gradcomp {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

absl::Status GetBinSizes(OpKernelContext* context, int num_tensors,
                         std::vector<int64_t>* bin_sizes) {
  TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, "bin_sizes", bin_sizes));
  return ToTensorFlow(CheckBinSizes(*bin_sizes, num_tensors));
}

absl::Status AdaCompEncodeInputs::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
  TF_RETURN_IF_ERROR(context->GetAttr("scale_factor", &scale_factor_));
  TF_RETURN_IF_ERROR(context->GetAttr("fingerprint", &fingerprint_));
  TF_RETURN_IF_ERROR(context->GetAttr("M", &num_moments_));
  TF_RETURN_IF_ERROR(squares_.Read(context, num_tensors_));
  TF_RETURN_IF_ERROR(
      CheckOneGradientEach(context, num_tensors_, num_moments_ + 3 + squares_.size()));
  if (num_moments_ == 0) return absl::OkStatus();
  if (num_moments_ != num_tensors_) {
    return InvalidArgument(num_moments_, " second moments for ", num_tensors_,
                           " residuals; expected one for each residual, or none");
  }
  return adam_.Read(context);
}

absl::Status AdaCompEncodeInputs::Read(OpKernelContext* context, Step* step) const {
  TF_RETURN_IF_ERROR(GetScalar(context, 2 * num_tensors_, "step", &step->step));
  TF_RETURN_IF_ERROR(GetBinSizes(context, num_tensors_, &step->bin_sizes));
  if (num_moments_ > 0) {
    const int adam_step = 2 * num_tensors_ + 1 + num_moments_;
    TF_RETURN_IF_ERROR(adam_.At(context, adam_step, "adam_step", num_tensors_, &step->adam));
  }
  TF_RETURN_IF_ERROR(step->variables.Lock(
      context, {{0, num_tensors_, "residual"},
                {2 * num_tensors_ + 1, num_moments_, "second moment"}}));
  TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->variables, num_tensors_));
  step->squares.resize(num_tensors_);
  for (int i = 0; i < num_tensors_; ++i) {
    const TensorShape& gradient = context->input(num_tensors_ + i).shape();
    TF_RETURN_IF_ERROR(
        squares_.At(context, first_squares(), i, gradient, &step->squares[i]));
  }
  return CheckMomentShapes(step->variables);
}

absl::Status AdaCompEncodeInputs::CheckMomentShapes(const LockedResiduals& variables) const {
  for (int i = 0; i < num_moments_; ++i) {
    const TensorShape& shape = variables.shape(num_tensors_ + i);
    if (shape == variables.shape(i)) continue;
    return InvalidArgument("second moment ", i, " has shape ", shape.DebugString(),
                           "; expected ", variables.shape(i).DebugString(),
                           ", that of its residual");
  }
  return absl::OkStatus();
}

std::vector<EncoderTensor> AdaCompEncodeInputs::Tensors(OpKernelContext* context,
                                                        const Step& step) const {
  std::vector<EncoderTensor> tensors;
  for (int i = 0; i < num_tensors_; ++i) {
    const Tensor& gradient = context->input(num_tensors_ + i);
    tensors.push_back({step.variables.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                       gradient.NumElements(), step.bin_sizes[i],
                       num_moments_ > 0 ? step.variables.data(num_tensors_ + i) : nullptr,
                       step.squares[i], num_moments_ > 0 ? step.adam[i] : AdamSettings{}});
  }
  return tensors;
}

absl::Status AdaCompEncodeInputs::TensorsOnHost(OpKernelContext* context, Step* step,
                                                HostTensors* host,
                                                std::vector<EncoderTensor>* tensors) const {
  std::vector<float*> variables;
  TF_RETURN_IF_ERROR(host->Variables(&step->variables, /*writes=*/true, &variables));
  *tensors = Tensors(context, *step);
  for (int i = 0; i < num_tensors_; ++i) {
    EncoderTensor& tensor = (*tensors)[i];
    const Tensor* gradient;
    TF_RETURN_IF_ERROR(host->Input(num_tensors_ + i, &gradient));
    tensor.residual = variables[i];
    tensor.gradient = gradient->data();
    if (tensor.second_moment) tensor.second_moment = variables[num_tensors_ + i];
    if (!tensor.squares) continue;
    const Tensor* squares;
    TF_RETURN_IF_ERROR(host->Input(first_squares() + i, &squares));
    tensor.squares = squares->flat<float>().data();
  }
  return absl::OkStatus();
}

absl::Status AdaCompEncodeInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<EncoderTensor> tensors;
  TF_RETURN_IF_ERROR(TensorsOnHost(context, step, &host, &tensors));
  AdaCompEncoder encoder(tensors, scale_factor_, ThreadPool(context));
  const bool finite = encoder.Run();
  const PayloadHeader header = Header(*step, finite, encoder.body_words());
  Outputs outputs;
  const absl::Status allocated = Allocate(context, header, &outputs);
  if (!allocated.ok()) encoder.Rollback();
  TF_RETURN_IF_ERROR(allocated);
  if (finite) encoder.WriteBody(outputs.payload + kHeaderWords);
  Finish(header, outputs);
  return host.Finish();
}

PayloadHeader AdaCompEncodeInputs::Header(const Step& step, bool finite,
                                          int64_t body_words) const {
  PayloadHeader header;
  header.method = static_cast<uint16_t>(Method::kAdaComp);
  header.fingerprint = fingerprint_;
  header.plan = PlanOf(step.bin_sizes);
  header.step = step.step;
  header.num_tensors = num_tensors_;
  header.flags = finite ? 0 : kNonFiniteFlag;
  header.length = kHeaderWords + body_words;
  return header;
}

absl::Status AdaCompEncodeInputs::Allocate(OpKernelContext* context, const PayloadHeader& header,
                                           Outputs* outputs) const {
  Tensor* payload;
  tensorflow::AllocatorAttributes attributes = context->output_alloc_attr(0);
  attributes.set_gpu_compatible(true);  // a GPU copies without waiting then; others don't mind
  TF_RETURN_IF_ERROR(
      context->allocate_output(0, TensorShape({header.length}), &payload, attributes));
  Tensor* tensor_bytes;
  TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({num_tensors_}), &tensor_bytes));
  *outputs = {payload->flat<int32_t>().data(), tensor_bytes->flat<int64_t>().data()};
  return absl::OkStatus();
}

void AdaCompEncodeInputs::Finish(const PayloadHeader& header, const Outputs& outputs) const {
  WriteHeader(header, outputs.payload);
  std::fill_n(outputs.tensor_bytes, num_tensors_, 0);
  for (int i = 0; i < num_tensors_ && !header.non_finite(); ++i) {
    const int64_t words = EntryOf(outputs.payload + kHeaderWords, i).code_words;
    outputs.tensor_bytes[i] = 4 * (kTableEntryWords + words);
  }
}

absl::Status AdaCompDecodeInputs::ReadAttributes(OpKernelConstruction* context) {
  int64_t num_tensors;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors));
  TF_RETURN_IF_ERROR(context->GetAttr("fingerprint", &fingerprint_));
  TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes_));
  if (static_cast<int64_t>(shapes_.size()) != num_tensors) {
    return InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors,
                           ": give one shape for each tensor");
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckTensorSize(i, shapes_[i].num_elements())));
  }
  return absl::OkStatus();
}

absl::Status AdaCompDecodeInputs::Read(OpKernelContext* context, Step* step) const {
  const Tensor& payloads = context->input(0);
  int64_t expected_step;
  TF_RETURN_IF_ERROR(GetScalar(context, 1, "step", &expected_step));
  TF_RETURN_IF_ERROR(CheckRows(payloads));
  std::vector<int64_t> bin_sizes;
  TF_RETURN_IF_ERROR(GetBinSizes(context, static_cast<int>(shapes_.size()), &bin_sizes));
  std::vector<DecoderTensor> tensors;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    tensors.push_back({shapes_[i].num_elements(), bin_sizes[i]});
  }
  step->decoder = std::make_unique<AdaCompDecoder>(tensors, fingerprint_, ThreadPool(context));
  TF_RETURN_IF_ERROR(
      ToTensorFlow(step->decoder->Read(payloads.flat<int32_t>().data(), payloads.dim_size(0),
                                       payloads.dim_size(1), expected_step)));
  Tensor* finite;
  TF_RETURN_IF_ERROR(context->allocate_output(static_cast<int>(shapes_.size()), {}, &finite));
  step->finite = finite->flat<bool>().data();
  return absl::OkStatus();
}

absl::Status AdaCompDecodeInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<float*> reduced(shapes_.size());
  for (size_t i = 0; i < shapes_.size(); ++i) {
    TF_RETURN_IF_ERROR(host.Output(static_cast<int>(i), shapes_[i], &reduced[i]));
  }
  *step->finite = step->decoder->Reduce(reduced);
  return host.Finish();
}

absl::Status AdaCompPutBackInputs::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
  return context->GetAttr("fingerprint", &fingerprint_);
}

absl::Status AdaCompPutBackInputs::Read(OpKernelContext* context, Step* step) const {
  const Tensor& payload = context->input(payload_input());
  std::vector<int64_t> bin_sizes;
  TF_RETURN_IF_ERROR(GetBinSizes(context, num_tensors_, &bin_sizes));
  TF_RETURN_IF_ERROR(step->residuals.Lock(context, num_tensors_));
  std::vector<DecoderTensor> tensors;
  for (int i = 0; i < num_tensors_; ++i) {
    tensors.push_back({step->residuals.shape(i).num_elements(), bin_sizes[i]});
  }
  step->decoder = std::make_unique<AdaCompDecoder>(tensors, fingerprint_, ThreadPool(context));
  return ToTensorFlow(step->decoder->Read(payload.flat<int32_t>().data(), 1,
                                          payload.NumElements(), std::nullopt));
}

absl::Status AdaCompPutBackInputs::OnHost(OpKernelContext* context, Step* step) const {
  if (!step->decoder->finite()) return absl::OkStatus();
  HostTensors host(context);
  std::vector<float*> values;
  TF_RETURN_IF_ERROR(host.Variables(&step->residuals, /*writes=*/true, &values));
  step->decoder->AddTo(values);
  return host.Finish();
}

}  // namespace gradcomp
