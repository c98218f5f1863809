#include "adacomp_on_host.h"

#include <vector>

#include "host_tensors.h"

namespace gradcomp {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

absl::Status TensorsOnHost(OpKernelContext* context, const AdaCompEncodeInputs& inputs,
                           AdaCompEncodeInputs::Step* step, HostTensors* host,
                           std::vector<EncoderTensor>* tensors) {
  std::vector<float*> variables;
  TF_RETURN_IF_ERROR(host->Variables(&step->variables, /*writes=*/true, &variables));
  *tensors = inputs.Tensors(context, *step);
  const size_t num_tensors = tensors->size();
  for (size_t i = 0; i < num_tensors; ++i) {
    EncoderTensor& tensor = (*tensors)[i];
    const Tensor* gradient;
    TF_RETURN_IF_ERROR(host->Input(static_cast<int>(num_tensors + i), &gradient));
    tensor.residual = variables[i];
    tensor.gradient = gradient->data();
    if (tensor.second_moment) tensor.second_moment = variables[num_tensors + i];
    if (!tensor.squares) continue;
    const Tensor* squares;
    TF_RETURN_IF_ERROR(host->Input(inputs.first_squares() + static_cast<int>(i), &squares));
    tensor.squares = squares->flat<float>().data();
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status EncodeAdaCompOnHost(OpKernelContext* context, const AdaCompEncodeInputs& inputs,
                                 AdaCompEncodeInputs::Step* step) {
  HostTensors host(context);
  std::vector<EncoderTensor> tensors;
  TF_RETURN_IF_ERROR(TensorsOnHost(context, inputs, step, &host, &tensors));
  AdaCompEncoder encoder(tensors, inputs.scale_factor(), ThreadPool(context));
  const bool finite = encoder.Run();
  const PayloadHeader header = inputs.Header(*step, finite, encoder.body_words());
  AdaCompEncodeInputs::Outputs outputs;
  const absl::Status allocated = inputs.Allocate(context, header, &outputs);
  if (!allocated.ok()) encoder.Rollback();
  TF_RETURN_IF_ERROR(allocated);
  if (finite) encoder.WriteBody(outputs.payload + kHeaderWords);
  inputs.Finish(header, outputs);
  return host.Finish();
}

absl::Status DecodeAdaCompOnHost(OpKernelContext* context, const AdaCompDecodeInputs& inputs,
                                 AdaCompDecoder* decoder) {
  HostTensors host(context);
  const int num_tensors = static_cast<int>(inputs.shapes().size());
  std::vector<float*> sums(num_tensors);
  for (int i = 0; i < num_tensors; ++i) {
    TF_RETURN_IF_ERROR(host.Output(i, inputs.shapes()[i], &sums[i]));
  }
  Tensor* finite;
  TF_RETURN_IF_ERROR(context->allocate_output(num_tensors, {}, &finite));
  finite->scalar<bool>()() = decoder->Reduce(sums);
  return host.Finish();
}

absl::Status PutBackAdaCompOnHost(OpKernelContext* context, LockedResiduals* residuals,
                                  AdaCompDecoder* decoder) {
  if (!decoder->finite()) return absl::OkStatus();
  HostTensors host(context);
  std::vector<float*> values;
  TF_RETURN_IF_ERROR(host.Variables(residuals, /*writes=*/true, &values));
  decoder->AddTo(values);
  return host.Finish();
}

}  // namespace gradcomp
