// The ops and their shapes. What they compute: tf_gradcomp/ops/power_sgd.py.
#include "shape_support.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

using ::tensorflow::shape_inference::InferenceContext;

absl::Status LeftShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status RightShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  c->set_output(0, c->input(c->num_inputs() - 1));
  c->set_output(1, c->Vector(c->UnknownDim()));
  c->set_output(2, c->Scalar());
  return absl::OkStatus();
}

absl::Status ReduceShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  for (int i = 0; i < num_tensors; ++i) c->set_output(i, c->input(num_tensors + i));
  c->set_output(num_tensors, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("PowerSgdLeft")
    .Input("residuals: N * resource")
    .Input("gradients: Tgradients")
    .Input("factors: N * resource")
    .Input("step: int64")
    .Output("left: float")
    .Output("finite: bool")
    .Attr("N: int >= 1")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("ranks: list(int)")
    .SetIsStateful()
    .SetShapeFn(LeftShape);

REGISTER_OP("PowerSgdRight")
    .Input("residuals: N * resource")
    .Input("gradients: Tgradients")
    .Input("left_sum: float")
    .Output("left: float")
    .Output("right: float")
    .Output("finite: bool")
    .Attr("N: int >= 1")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("ranks: list(int)")
    .SetIsStateful()
    .SetShapeFn(RightShape);

REGISTER_OP("PowerSgdReduce")
    .Input("residuals: N * resource")
    .Input("gradients: Tgradients")
    .Input("factors: N * resource")
    .Input("left: float")
    .Input("right: float")
    .Input("right_sum: float")
    .Input("keep: bool")
    .Input("finite: bool")
    .Output("reduced: N * float")
    .Output("all_finite: bool")
    .Attr("N: int >= 1")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("ranks: list(int)")
    .SetIsStateful()
    .SetShapeFn(ReduceShape);

}  // namespace
}  // namespace gradcomp
