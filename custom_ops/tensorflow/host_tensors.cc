#include "host_tensors.h"

#include <utility>

#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/device.h"

namespace gradcomp {

HostTensors::HostTensors(OpKernelContext* context)
    : context_(context),
      on_gpu_(context->device()->attributes().device_type() == DEVICE_GPU) {}

absl::Status HostTensors::Input(int i, const Tensor** input) {
  *input = &context_->input(i);
  if (!on_gpu_) return absl::OkStatus();
  inputs_.emplace_back();
  TF_RETURN_IF_ERROR(CopyToHost(**input, &inputs_.back()));
  *input = &inputs_.back();
  return absl::OkStatus();
}

std::unique_ptr<Tensor> HostTensors::Take(int i) {
  if (on_gpu_) return nullptr;
  const Tensor& input = context_->input(i);
  auto taken = context_->forward_input(i, OpKernelContext::Params::kNoReservation,
                                       tensorflow::DT_FLOAT, input.shape(),
                                       context_->input_memory_type(i), AllocatorAttributes());
  if (!taken || taken->NumElements() == 0) return nullptr;
  // A part of a larger tensor would keep all of that tensor in memory.
  const size_t allocated = tensorflow::DMAHelper::buffer(taken.get())->root_buffer()->size();
  return allocated == taken->TotalBytes() ? std::move(taken) : nullptr;
}

absl::Status HostTensors::Variables(LockedResiduals* variables, bool writes,
                                    std::vector<float*>* data) {
  if (!on_gpu_) {
    if (writes) TF_RETURN_IF_ERROR(variables->Unshare(context_));
    *data = variables->all_data();
    return absl::OkStatus();
  }
  for (int i = 0; i < variables->size(); ++i) {
    Tensor on_host;
    TF_RETURN_IF_ERROR(CopyToHost(*variables->tensor(i), &on_host));
    data->push_back(on_host.flat<float>().data());
    if (writes) {
      variables_.push_back({on_host, variables->tensor(i)});
    } else {
      inputs_.push_back(on_host);
    }
  }
  return absl::OkStatus();
}

absl::Status HostTensors::Sources(LockedResiduals* variables, int num_tensors, bool writes,
                                  std::vector<Source>* sources, std::vector<float*>* others) {
  std::vector<float*> data;
  TF_RETURN_IF_ERROR(Variables(variables, writes, &data));
  for (int i = 0; i < num_tensors; ++i) {
    const Tensor* gradient;
    TF_RETURN_IF_ERROR(Input(num_tensors + i, &gradient));
    sources->push_back({data[i], gradient->data(), ToGradientType(gradient->dtype())});
  }
  if (others) others->assign(data.begin() + num_tensors, data.end());
  return absl::OkStatus();
}

absl::Status HostTensors::Output(int i, const TensorShape& shape, float** data,
                                 int forwarded_input) {
  Tensor* output;
  if (!on_gpu_ && forwarded_input >= 0) {
    TF_RETURN_IF_ERROR(
        context_->forward_input_or_allocate_output({forwarded_input}, i, shape, &output));
  } else {
    TF_RETURN_IF_ERROR(context_->allocate_output(i, shape, &output));
  }
  Tensor on_host = *output;
  if (on_gpu_) {
    TF_RETURN_IF_ERROR(context_->allocate_temp(output->dtype(), shape, &on_host, PinnedOnHost()));
    outputs_.push_back({on_host, output});
  }
  *data = on_host.flat<float>().data();
  return absl::OkStatus();
}

absl::Status HostTensors::Finish() {
  for (const Copy& output : outputs_) {
    TF_RETURN_IF_ERROR(CopyToDevice(output.on_host, output.on_device));
  }
  // Copies into new buffers, because values that were read may share the old buffers. All buffers
  // are copied before any variable changes.
  std::vector<Tensor> written;
  for (const Copy& variable : variables_) {
    const Tensor& on_host = variable.on_host;
    written.emplace_back();
    TF_RETURN_IF_ERROR(
        context_->allocate_temp(on_host.dtype(), on_host.shape(), &written.back()));
    TF_RETURN_IF_ERROR(CopyToDevice(on_host, &written.back()));
  }
  for (size_t i = 0; i < variables_.size(); ++i) *variables_[i].on_device = written[i];
  return absl::OkStatus();
}

absl::Status HostTensors::CopyToHost(const Tensor& from, Tensor* to) {
  TF_RETURN_IF_ERROR(context_->allocate_temp(from.dtype(), from.shape(), to, PinnedOnHost()));
  if (from.NumElements() == 0) return absl::OkStatus();
  auto* device = static_cast<tensorflow::Device*>(context_->device());
  return context_->op_device_context()->CopyDeviceTensorToCPUSync(&from, "", device, to);
}

absl::Status HostTensors::CopyToDevice(const Tensor& from, Tensor* to) {
  if (from.NumElements() == 0) return absl::OkStatus();
  auto* device = static_cast<tensorflow::Device*>(context_->device());
  return context_->op_device_context()->CopyCPUTensorToDeviceSync(&from, device, to);
}

}  // namespace gradcomp
