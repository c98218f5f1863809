// An op that does its work on the host.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_ON_HOST_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_ON_HOST_H_

#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// Inputs: a class that reads a Step from inputs and attributes, and says what the op does with it on the
// host.
template <typename Inputs>
class OpOnHost : public tensorflow::OpKernel {
 public:
  explicit OpOnHost(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    typename Inputs::Step step;
    OP_REQUIRES_OK(context, inputs_.Read(context, &step));
    OP_REQUIRES_OK(context, inputs_.OnHost(context, &step));
  }

 private:
  Inputs inputs_;
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_ON_HOST_H_
