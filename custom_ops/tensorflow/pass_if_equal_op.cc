// A check without a side effect; see tf_gradcomp/ops/payload.py.
#include <string>

#include "status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

class PassIfEqualOp : public OpKernel {
 public:
  explicit PassIfEqualOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("message", &message_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& actual = context->input(1);
    const Tensor& expected = context->input(2);
    OP_REQUIRES(context, actual.shape() == expected.shape() && Equal(actual, expected),
                InvalidArgument(message_));
    context->set_output(0, context->input(0));
  }

 private:
  static bool Equal(const Tensor& a, const Tensor& b) {
    const auto values = a.flat<float>();
    const auto others = b.flat<float>();
    for (int64_t i = 0; i < values.size(); ++i) {
      if (!(values(i) == others(i))) return false;  // NaN equals nothing
    }
    return true;
  }

  std::string message_;
};

absl::Status SameShape(InferenceContext* c) {
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

// Not stateful on purpose.
REGISTER_OP("PassIfEqual")
    .Input("value: T")
    .Input("actual: float")
    .Input("expected: float")
    .Output("passed: T")
    .Attr("T: type")
    .Attr("message: string")
    .SetShapeFn(SameShape);

REGISTER_KERNEL_BUILDER(Name("PassIfEqual").Device(DEVICE_CPU), PassIfEqualOp);

}  // namespace
}  // namespace gradcomp
