// Adam's preconditioning of local gradients. What it computes: tf_gradcomp/ops/precondition.py.
#include <vector>

#include "../kernels/precondition.h"
#include "adam_support.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::shape_inference::InferenceContext;

class PreconditionOp : public OpKernel {
 public:
  explicit PreconditionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, adam_.Read(context));
    OP_REQUIRES_OK(context, squares_.Read(context, num_tensors_));
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, 1 + squares_.size()));
  }

  void Compute(OpKernelContext* context) override {
    AdamSettings settings;
    OP_REQUIRES_OK(context, adam_.At(context, 2 * num_tensors_, "step", &settings));
    LockedResiduals moments;
    OP_REQUIRES_OK(context, moments.Lock(context, num_tensors_, 0, "second moment"));
    OP_REQUIRES_OK(context, CheckGradientShapes(context, moments, num_tensors_));
    OP_REQUIRES_OK(context, moments.Unshare(context));
    std::vector<PreconditionTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      const float* squares;
      OP_REQUIRES_OK(context, squares_.At(context, 2 * num_tensors_ + 1, i, gradient.shape(),
                                          &squares));
      Tensor* output;
      OP_REQUIRES_OK(context, context->allocate_output(i, gradient.shape(), &output));
      tensors.push_back({moments.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                         gradient.NumElements(), output->flat<float>().data(), squares});
    }
    Precondition(tensors, settings, ThreadPool(context));
  }

 private:
  int num_tensors_;
  AdamAttributes adam_;
  SquaresInputs squares_;
};

absl::Status PreconditionShape(InferenceContext* c) {
  const int num_tensors = c->num_outputs();
  for (int i = 0; i < num_tensors; ++i) c->set_output(i, c->input(num_tensors + i));
  return absl::OkStatus();
}

REGISTER_OP("Precondition")
    .Input("second_moments: N * resource")
    .Input("gradients: Tgradients")
    .Input("step: int64")
    .Input("squares: S * float")
    .Output("preconditioned: N * float")
    .Attr("N: int >= 1")
    .Attr("S: int >= 0")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("beta_2: float")
    .Attr("epsilon: float")
    .Attr("scale: float")
    .SetIsStateful()
    .SetShapeFn(PreconditionShape);

REGISTER_KERNEL_BUILDER(Name("Precondition").Device(DEVICE_CPU), PreconditionOp);

}  // namespace
}  // namespace gradcomp
