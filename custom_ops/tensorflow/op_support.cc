#include "op_support.h"

#include <algorithm>
#include <cstring>

#include "../kernels/adacomp_layout.h"
#include "tensorflow/core/util/work_sharder.h"

namespace gradcomp {

GradientType ToGradientType(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return GradientType::kHalf;
    case tensorflow::DT_BFLOAT16:
      return GradientType::kBFloat16;
    default:
      return GradientType::kFloat;
  }
}

AllocatorAttributes PinnedOnHost() {
  AllocatorAttributes attributes;
  attributes.set_on_host(true);
  attributes.set_gpu_compatible(true);
  return attributes;
}

absl::Status AllocateOnHost(OpKernelContext* context, int i, int64_t size, Tensor** output) {
  AllocatorAttributes attributes = context->output_alloc_attr(i);
  attributes.set_gpu_compatible(true);
  return context->allocate_output(i, TensorShape({size}), output, attributes);
}

absl::Status AllocateFlag(OpKernelContext* context, int i, bool** flag) {
  Tensor* output;
  TF_RETURN_IF_ERROR(context->allocate_output(i, TensorShape({}), &output));
  *flag = output->flat<bool>().data();
  return absl::OkStatus();
}

ParallelFor ThreadPool(OpKernelContext* context) {
  const auto* workers = context->device()->tensorflow_cpu_worker_threads();
  return [workers](int64_t count, int64_t cost, const Work& work) {
    tensorflow::Shard(workers->num_threads, workers->workers, count, cost, work);
  };
}

absl::Status GetSettings(OpKernelContext* context, int input, const char* name,
                         std::vector<int64_t>* settings) {
  const Tensor& tensor = context->input(input);
  if (tensor.dims() != 1) {
    return InvalidArgument(name, " has shape ", tensor.shape().DebugString(),
                           "; expected a vector, with an entry for each tensor");
  }
  const auto values = tensor.vec<int64_t>();
  settings->assign(values.data(), values.data() + values.size());
  return absl::OkStatus();
}

absl::Status CheckOneGradientEach(OpKernelConstruction* context, int num_tensors,
                                  int num_own_inputs) {
  const int num_gradients = context->num_inputs() - num_tensors - num_own_inputs;
  if (num_gradients == num_tensors) return absl::OkStatus();
  return InvalidArgument(num_gradients, " gradients for ", num_tensors,
                         " residuals; expected one gradient for each residual");
}

absl::Status CheckRows(const Tensor& payloads) {
  if (payloads.dims() == 2 && payloads.dim_size(0) > 0) return absl::OkStatus();
  return InvalidArgument("payloads have shape ", payloads.shape().DebugString(),
                         "; expected a row for each replica: [replicas, words]");
}

namespace {

std::string Names(const std::vector<VariableInputs>& inputs) {
  std::string names;
  for (const VariableInputs& group : inputs) {
    if (group.size > 0) names += (names.empty() ? "" : " or ") + std::string(group.name);
  }
  return names;
}

absl::Status CheckVariable(Var* variable, const char* name, int i) {
  const Tensor& tensor = *variable->tensor();
  if (!variable->is_initialized || !tensor.IsInitialized()) {
    return absl::FailedPreconditionError(
        Concat(name, " ", i, " is not initialized; assign zeros to it first"));
  }
  if (tensor.dtype() != tensorflow::DT_FLOAT) {
    return InvalidArgument(name, " ", i, " is a variable of ", DataTypeString(tensor.dtype()),
                           "; expected float32 for every type of gradient");
  }
  return ToTensorFlow(CheckTensorSize(i, tensor.NumElements()));
}

}  // namespace

absl::Status LockedResiduals::Lock(OpKernelContext* context,
                                   const std::vector<VariableInputs>& inputs) {
  for (const VariableInputs& group : inputs) {
    for (int i = 0; i < group.size; ++i) {
      variables_.emplace_back();
      TF_RETURN_IF_ERROR(LookupResource(
          context, tensorflow::HandleFromInput(context, group.first + i), &variables_.back()));
    }
  }
  std::vector<Var*> in_order;
  for (const auto& variable : variables_) in_order.push_back(variable.get());
  // Sorts by address, so that two ops with the same variables don't deadlock.
  std::sort(in_order.begin(), in_order.end(), [](Var* a, Var* b) { return a->mu() < b->mu(); });
  if (std::adjacent_find(in_order.begin(), in_order.end()) != in_order.end()) {
    return InvalidArgument("a ", Names(inputs), " is given twice; expected a separate variable "
                           "for each tensor");
  }
  for (Var* variable : in_order) {
    locks_.push_back(std::make_unique<tensorflow::mutex_lock>(*variable->mu()));
  }
  auto variable = variables_.begin();
  for (const VariableInputs& group : inputs) {
    for (int i = 0; i < group.size; ++i) {
      TF_RETURN_IF_ERROR(CheckVariable((variable++)->get(), group.name, i));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> LockedResiduals::all_sizes() const {
  std::vector<int64_t> sizes;
  for (int i = 0; i < size(); ++i) sizes.push_back(shape(i).num_elements());
  return sizes;
}

absl::Status LockedResiduals::Unshare(OpKernelContext* context) {
  return Unshare(context, [context](const float* from, int64_t size, float* to) {
    ThreadPool(context)(size, 1, [=](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, (end - begin) * sizeof(float));
    });
    return absl::OkStatus();
  });
}

absl::Status LockedResiduals::Unshare(OpKernelContext* context, const Copy& copy) {
  for (auto& variable : variables_) {
    Tensor* tensor = variable->tensor();
    if (tensor->RefCountIsOne()) continue;
    Tensor own;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &own));
    TF_RETURN_IF_ERROR(copy(tensor->flat<float>().data(), tensor->NumElements(),
                            own.flat<float>().data()));
    *tensor = own;
  }
  return absl::OkStatus();
}

absl::Status CheckGradientShapes(OpKernelContext* context, const LockedResiduals& residuals,
                                 int num_tensors) {
  for (int i = 0; i < num_tensors; ++i) {
    const TensorShape& shape = context->input(num_tensors + i).shape();
    if (shape == residuals.shape(i)) continue;
    return InvalidArgument("gradient ", i, " has shape ", shape.DebugString(), "; expected ",
                           residuals.shape(i).DebugString(), ", the shape of its residual");
  }
  return absl::OkStatus();
}

std::vector<Source> SourcesOf(OpKernelContext* context, const LockedResiduals& residuals,
                              int num_tensors) {
  std::vector<Source> sources;
  for (int i = 0; i < num_tensors; ++i) {
    const Tensor& gradient = context->input(num_tensors + i);
    sources.push_back({residuals.data(i), gradient.data(), ToGradientType(gradient.dtype())});
  }
  return sources;
}

}  // namespace gradcomp
