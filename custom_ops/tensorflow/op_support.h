// What the OpKernels share.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "../kernels/common.h"
#include "../kernels/floats.h"
#include "../kernels/source.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace gradcomp {

GradientType ToGradientType(tensorflow::DataType dtype);

// Memory of the host from and to which a device copies without waiting.
AllocatorAttributes PinnedOnHost();

// An output that is a vector there.
absl::Status AllocateOnHost(OpKernelContext* context, int i, int64_t size,
                            Tensor** output);

// TensorFlow's intra-op threads.
ParallelFor ThreadPool(OpKernelContext* context);

// Reads the input, a vector that errors call `name`: a setting of each tensor. A method checks it.
absl::Status GetSettings(OpKernelContext* context, int input, const char* name,
                         std::vector<int64_t>* settings);

// Reads the input, a scalar that errors call `name`.
template <typename Value>
absl::Status GetScalar(OpKernelContext* context, int input, const char* name,
                       Value* value) {
  const Tensor& tensor = context->input(input);
  if (tensor.dims() != 0) {
    return InvalidArgument(name, " has shape ", tensor.shape().DebugString(),
                           "; expected a scalar");
  }
  *value = tensor.scalar<Value>()();
  return absl::OkStatus();
}

// Checks that the inputs are residuals, as many gradients, and what an op has of its own.
absl::Status CheckOneGradientEach(OpKernelConstruction* context, int num_tensors,
                                  int num_own_inputs);

// Checks that there is a row for each replica.
absl::Status CheckRows(const Tensor& payloads);

// Inputs of an op that are variables; errors call each of them `name`.
struct VariableInputs {
  int first;
  int size;
  const char* name;
};

// Resource variables, locked for as long as this lives, that may be written in place.
class LockedResiduals {
 public:
  absl::Status Lock(OpKernelContext* context, int num_variables, int first_input = 0,
                    const char* name = "residual") {
    return Lock(context, {{first_input, num_variables, name}});
  }

  // All that an op locks, at once, so that no two ops wait for each other. They are numbered on.
  absl::Status Lock(OpKernelContext* context,
                    const std::vector<VariableInputs>& inputs);

  const TensorShape& shape(int i) const { return variables_[i]->tensor()->shape(); }

  // Before the first write: gives a variable a buffer of its own if a value that was read from it
  // still shares it, as TensorFlow's own assignments do.
  absl::Status Unshare(OpKernelContext* context);

  // The same, by copy(from, size, to), for variables that are not on the host.
  using Copy = std::function<absl::Status(const float* from, int64_t size, float* to)>;
  absl::Status Unshare(OpKernelContext* context, const Copy& copy);

  // Before this ends, once all work is given to a stream that works in order.
  void Unlock() { locks_.clear(); }

  int size() const { return static_cast<int>(variables_.size()); }
  std::vector<int64_t> all_sizes() const;  // elements
  Tensor* tensor(int i) const { return variables_[i]->tensor(); }

  // After Unshare.
  float* data(int i) const { return variables_[i]->tensor()->flat<float>().data(); }
  std::vector<float*> all_data() const {
    std::vector<float*> all;
    for (int i = 0; i < size(); ++i) all.push_back(data(i));
    return all;
  }

 private:
  std::vector<tensorflow::core::RefCountPtr<Var>> variables_;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks_;  // released before the variables
};

// Checks that the inputs behind the residuals are gradients of the same shapes.
absl::Status CheckGradientShapes(OpKernelContext* context,
                                 const LockedResiduals& residuals, int num_tensors);

// Allocates an output that is one bool, on the host.
absl::Status AllocateFlag(OpKernelContext* context, int i, bool** flag);

// Allocates the first outputs on the op's device: one in each shape, which `shapes` has as .shape(i).
template <typename Shapes>
absl::Status AllocateReduced(OpKernelContext* context, const Shapes& shapes, int num_tensors,
                             std::vector<float*>* reduced) {
  for (int i = 0; i < num_tensors; ++i) {
    Tensor* output;
    TF_RETURN_IF_ERROR(context->allocate_output(i, shapes.shape(i), &output));
    reduced->push_back(output->flat<float>().data());
  }
  return absl::OkStatus();
}

// Residuals and their gradients, which are the inputs behind them, on the op's device. Residuals may
// be shared as long as they are only read.
std::vector<Source> SourcesOf(OpKernelContext* context,
                              const LockedResiduals& residuals, int num_tensors);

}  // namespace gradcomp
