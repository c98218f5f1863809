// The tensors of an op that does its work on the host, whatever device it runs on.
#pragma once

#include <deque>
#include <vector>

#include "op_support.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// On a CPU, inputs, variables and outputs as they are. On a GPU, where an op comes whose kernels can't be
// used, copies of them; what was written goes to the device with Finish, and is lost without it.
class HostTensors {
 public:
  explicit HostTensors(OpKernelContext* context);

  // An input of the op that is on its device.
  absl::Status Input(int i, const Tensor** input);

  // Variables that are read and, if `writes`, written in place.
  absl::Status Variables(LockedResiduals* variables, bool writes, std::vector<float*>* data);

  // The first `num_tensors` variables, which are residuals, with their gradients, the inputs behind
  // them. `others` gets the data of the other variables, if it is given.
  absl::Status Sources(LockedResiduals* variables, int num_tensors, bool writes,
                       std::vector<Source>* sources, std::vector<float*>* others = nullptr);

  // Allocates an output that is on the op's device; on a CPU in place of an input, if that may be.
  absl::Status Output(int i, const TensorShape& shape, float** data,
                      int in_place_of = -1);

  absl::Status Finish();

 private:
  struct Copy {
    Tensor on_host;
    Tensor* on_device;
  };

  absl::Status CopyToHost(const Tensor& from, Tensor* to);
  absl::Status CopyToDevice(const Tensor& from, Tensor* to);

  OpKernelContext* const context_;
  const bool on_gpu_;
  std::deque<Tensor> inputs_;
  std::vector<Copy> variables_;
  std::vector<Copy> outputs_;
};

}  // namespace gradcomp
