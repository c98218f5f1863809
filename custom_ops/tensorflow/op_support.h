// Helpers of the OpKernels.
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

// Returns the attributes of pinned host memory, for asynchronous copies.
AllocatorAttributes PinnedOnHost();

// Allocates an output vector in pinned host memory.
absl::Status AllocateOnHost(OpKernelContext* context, int i, int64_t size,
                            Tensor** output);

// Returns a ParallelFor on TensorFlow's intra-op threads.
ParallelFor ThreadPool(OpKernelContext* context);

// Reads the input, a vector that errors call `name`, with a setting of each tensor. The method
// checks the settings.
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

// Checks that the inputs are residuals, as many gradients, and the op's own inputs.
absl::Status CheckOneGradientEach(OpKernelConstruction* context, int num_tensors,
                                  int num_own_inputs);

// Checks that `payloads` has a row for each replica.
absl::Status CheckRows(const Tensor& payloads);

// The inputs of an op that are variables; errors call each of them `name`.
struct VariableInputs {
  int first;
  int size;
  const char* name;
};

// Resource variables that are locked during the lifetime of this object, and may be written in
// place.
class LockedResiduals {
 public:
  absl::Status Lock(OpKernelContext* context, int num_variables, int first_input = 0,
                    const char* name = "residual") {
    return Lock(context, {{first_input, num_variables, name}});
  }

  // Locks all variables of an op at once, so that no two ops deadlock. Variables are numbered
  // consecutively.
  absl::Status Lock(OpKernelContext* context,
                    const std::vector<VariableInputs>& inputs);

  const TensorShape& shape(int i) const { return variables_[i]->tensor()->shape(); }

  // Must be called before the first write. Gives a variable a new buffer if a value that was read
  // from the variable still shares its buffer, like TensorFlow's own assignments.
  absl::Status Unshare(OpKernelContext* context);

  // Does the same by copy(from, size, to), for variables that are not on the host.
  using Copy = std::function<absl::Status(const float* from, int64_t size, float* to)>;
  absl::Status Unshare(OpKernelContext* context, const Copy& copy);

  // Unlocks early, once all work is submitted to a stream.
  void Unlock() { locks_.clear(); }

  int size() const { return static_cast<int>(variables_.size()); }
  std::vector<int64_t> all_sizes() const;  // elements
  Tensor* tensor(int i) const { return variables_[i]->tensor(); }

  // Must be called after Unshare.
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

// Checks that the inputs after the residuals are gradients of the same shapes.
absl::Status CheckGradientShapes(OpKernelContext* context,
                                 const LockedResiduals& residuals, int num_tensors);

// Allocates a bool output on the host.
absl::Status AllocateFlag(OpKernelContext* context, int i, bool** flag);

// Allocates the first outputs on the op's device, with the shapes shapes.shape(i).
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

// Returns residuals and their gradients, which are the next inputs, on the op's device. Residuals
// may be shared while they are only read.
std::vector<Source> SourcesOf(OpKernelContext* context,
                              const LockedResiduals& residuals, int num_tensors);

}  // namespace gradcomp
