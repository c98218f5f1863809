// Registers the ops with their shape functions. tf_gradcomp/ops/power_sgd.py documents the ops.
#include <cstdint>
#include <optional>
#include <vector>

#include "../kernels/power_sgd.h"
#include "shape_support.h"
#include "status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

// The numbers of elements of the two summed vectors; unknown if shapes or ranks are unknown.
struct Lengths {
  DimensionHandle left;
  DimensionHandle right;
};

absl::Status GetLengths(InferenceContext* c, Lengths* lengths) {
  *lengths = {c->UnknownDim(), c->UnknownDim()};
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  std::optional<std::vector<int64_t>> ranks;
  TF_RETURN_IF_ERROR(GetKnownSettings(c, c->num_inputs() - 1, &ranks));
  if (!ranks) return absl::OkStatus();
  TF_RETURN_IF_ERROR(ToTensorFlow(CheckRanks(*ranks, num_tensors)));
  int64_t left = 1;
  int64_t right = 0;
  for (int i = 0; i < num_tensors; ++i) {
    const ShapeHandle shape = c->input(num_tensors + i);
    if (!c->FullyDefined(shape)) return absl::OkStatus();
    PowerSgdTensor tensor = {};
    tensor.columns = c->Rank(shape) == 0 ? 1 : c->Value(c->Dim(shape, -1));
    const int64_t elements = c->Value(c->NumElements(shape));
    tensor.rows = elements == 0 ? 0 : elements / tensor.columns;
    tensor.rank = (*ranks)[i];
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckRank(i, tensor.rank, tensor.rows, tensor.columns)));
    left += tensor.left_size();
    right += tensor.right_size();
  }
  *lengths = {c->MakeDim(left), c->MakeDim(right)};
  return absl::OkStatus();
}

absl::Status LeftShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  Lengths lengths;
  TF_RETURN_IF_ERROR(GetLengths(c, &lengths));
  c->set_output(0, c->Vector(lengths.left));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status RightShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  Lengths lengths;
  TF_RETURN_IF_ERROR(GetLengths(c, &lengths));
  c->set_output(0, c->input(c->num_inputs() - 2));
  c->set_output(1, c->Vector(lengths.right));
  c->set_output(2, c->Scalar());
  return absl::OkStatus();
}

absl::Status ReduceShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  Lengths lengths;  // unused, but computing them checks the ranks
  TF_RETURN_IF_ERROR(GetLengths(c, &lengths));
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  for (int i = 0; i < num_tensors; ++i) c->set_output(i, c->input(num_tensors + i));
  c->set_output(num_tensors, c->Scalar());
  return absl::OkStatus();
}

// The length of the summed vector also depends on the factors.
absl::Status ProjectShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(num_tensors));
  c->set_output(2, c->Scalar());
  return absl::OkStatus();
}

GRADCOMP_RESIDUALS_OP("PowerSgdLeft")
    .Input("factors: N * resource")
    .Input("step: int64")
    .Input("ranks: int64")
    .Output("left: float")
    .Output("finite: bool")
    .SetShapeFn(LeftShape);

GRADCOMP_RESIDUALS_OP("PowerSgdRight")
    .Input("left_sum: float")
    .Input("ranks: int64")
    .Output("left: float")
    .Output("right: float")
    .Output("finite: bool")
    .SetShapeFn(RightShape);

GRADCOMP_RESIDUALS_OP("PowerSgdReduce")
    .Input("factors: N * resource")
    .Input("left: float")
    .Input("right: float")
    .Input("right_sum: float")
    .Input("keep: bool")
    .Input("finite: bool")
    .Input("ranks: int64")
    .Output("reduced: N * float")
    .Output("all_finite: bool")
    .SetShapeFn(ReduceShape);

GRADCOMP_RESIDUALS_OP("PowerSgdProject")
    .Input("factors: N * resource")
    .Input("step: int64")
    .Input("ranks: int64")
    .Output("local: float")
    .Output("tensor_bytes: int64")
    .Output("finite: bool")
    .SetShapeFn(ProjectShape);

GRADCOMP_RESIDUALS_OP("PowerSgdReduceProjected")
    .Input("factors: N * resource")
    .Input("step: int64")
    .Input("local: float")
    .Input("total: float")
    .Input("keep: bool")
    .Input("finite: bool")
    .Input("ranks: int64")
    .Output("reduced: N * float")
    .Output("all_finite: bool")
    .SetShapeFn(ReduceShape);

}  // namespace
}  // namespace gradcomp
