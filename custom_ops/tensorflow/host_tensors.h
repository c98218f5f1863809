// Host copies of an op's tensors, for an op that does its work on the host but runs on any device.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "op_support.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// On a CPU, these are the inputs, variables and outputs themselves. On a GPU whose kernels can't be
// used, these are copies. Finish copies written data to the device; without Finish, the data is
// lost.
class HostTensors {
 public:
  explicit HostTensors(OpKernelContext* context);

  // Gets an input of the op that is on its device.
  absl::Status Input(int i, const Tensor** input);

  // Takes the memory of a float32 input if nothing else uses the memory; otherwise returns null.
  std::unique_ptr<Tensor> Take(int i);

  // Gets variables that are read and, if `writes`, written in place.
  absl::Status Variables(LockedResiduals* variables, bool writes, std::vector<float*>* data);

  // Gets the first `num_tensors` variables, which are residuals, with their gradients, which are
  // the next inputs. `others` gets the data of the other variables, if it is given.
  absl::Status Sources(LockedResiduals* variables, int num_tensors, bool writes,
                       std::vector<Source>* sources, std::vector<float*>* others = nullptr);

  // Allocates an output on the op's device; on a CPU, reuses the memory of an input if possible.
  absl::Status Output(int i, const TensorShape& shape, float** data,
                      int forwarded_input = -1);

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
