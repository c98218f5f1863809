// Adam's preconditioning of local gradients. What it computes: tf_gradcomp/ops/precondition.py.
#include <cmath>
#include <vector>

#include "../kernels/precondition.h"
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
    OP_REQUIRES_OK(context, context->GetAttr("beta_2", &beta_2_));
    OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, 1));
    OP_REQUIRES(context, 0 <= beta_2_ && beta_2_ < 1,
                InvalidArgument("beta_2 is ", beta_2_, "; expected 0 or more, and less than 1"));
    OP_REQUIRES(context, epsilon_ > 0,
                InvalidArgument("epsilon is ", epsilon_, "; expected a positive number"));
    OP_REQUIRES(context, scale_ > 0 && std::isfinite(scale_),
                InvalidArgument("scale is ", scale_, "; expected a positive number"));
  }

  void Compute(OpKernelContext* context) override {
    int64_t step = 0;
    OP_REQUIRES_OK(context, GetScalar(context, 2 * num_tensors_, "step", &step));
    OP_REQUIRES(context, step >= 1,
                InvalidArgument("step is ", step, "; expected 1 or more"));
    LockedResiduals moments;
    OP_REQUIRES_OK(context, moments.Lock(context, num_tensors_, 0, "second moment"));
    OP_REQUIRES_OK(context, CheckGradientShapes(context, moments, num_tensors_));
    OP_REQUIRES_OK(context, moments.Unshare(context));
    std::vector<PreconditionTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      Tensor* output;
      OP_REQUIRES_OK(context, context->allocate_output(i, gradient.shape(), &output));
      tensors.push_back({moments.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                         gradient.NumElements(), output->flat<float>().data()});
    }
    const double correction = 1 - std::pow(static_cast<double>(beta_2_), step);
    const AdamSettings settings{beta_2_, epsilon_, static_cast<float>(scale_ / correction)};
    Precondition(tensors, settings, ThreadPool(context));
  }

 private:
  int num_tensors_;
  float beta_2_;
  float epsilon_;
  float scale_;
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
    .Output("preconditioned: N * float")
    .Attr("N: int >= 1")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("beta_2: float")
    .Attr("epsilon: float")
    .Attr("scale: float")
    .SetIsStateful()
    .SetShapeFn(PreconditionShape);

REGISTER_KERNEL_BUILDER(Name("Precondition").Device(DEVICE_CPU), PreconditionOp);

}  // namespace
}  // namespace gradcomp
