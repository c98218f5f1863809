// What the kernels of PowerSGD's ops read from their inputs and write to their outputs, and what they do
// on the host, whatever the device.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_POWER_SGD_INPUTS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_POWER_SGD_INPUTS_H_

#include <cstdint>
#include <vector>

#include "../kernels/power_sgd.h"
#include "host_tensors.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// Residuals and gradients are the first inputs, then there may be factors; those of the op itself follow,
// and the ranks are the last.
class PowerSgdInputs {
 public:
  // What an op works on, locked for as long as this lives. Variables are residuals, and factors behind
  // them.
  struct Work {
    std::vector<int64_t> ranks;
    LockedResiduals variables;
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context, bool has_factors,
                              int num_own_inputs);

  absl::Status Begin(tensorflow::OpKernelContext* context, Work* work) const;

  // On the op's device. Variables may be shared as long as they are only read.
  std::vector<PowerSgdTensor> Tensors(tensorflow::OpKernelContext* context,
                                      const Work& work) const;

  // On the host, with the variables' data there.
  absl::Status TensorsOnHost(Work* work, bool writes, HostTensors* host,
                             std::vector<PowerSgdTensor>* tensors,
                             std::vector<float*>* factors) const;

  // An own input, a vector of `size` elements that errors call `name`.
  absl::Status GetVector(tensorflow::OpKernelContext* context, int own_input, const char* name,
                         int64_t size, const float** values) const;

  int own_index(int i) const { return (has_factors_ ? 3 : 2) * num_tensors_ + i; }
  int num_tensors() const { return num_tensors_; }

 private:
  absl::Status CheckFactors(const Work& work) const;
  PowerSgdTensor TensorOf(const Work& work, int i, const Source& source) const;

  bool has_factors_;
  int num_tensors_;
};

class PowerSgdLeftInputs : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    int64_t step = 0;
    float* left = nullptr;  // the outputs
    bool* finite = nullptr;
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return PowerSgdInputs::ReadAttributes(context, true, 1);
  }
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;
};

class PowerSgdRightInputs : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    float* left = nullptr;   // the outputs, the first of them orthonormal if that is
    float* right = nullptr;  // finite; if it is not, the second one is zeros
    bool finite = false;
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return PowerSgdInputs::ReadAttributes(context, false, 1);
  }
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;
};

class PowerSgdReduceInputs : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    const float* left = nullptr;
    const float* right = nullptr;
    const float* right_sum = nullptr;
    bool keep = false;
    bool finite = false;  // with the products
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return PowerSgdInputs::ReadAttributes(context, true, 5);
  }

  // Writes the output `all_finite`, too.
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_POWER_SGD_INPUTS_H_
