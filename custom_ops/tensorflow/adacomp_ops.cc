// Registers the ops with their shape functions. tf_gradcomp/ops/sparsification.py documents the ops.
#include <cstdint>
#include <vector>

#include "../kernels/adacomp_layout.h"
#include "shape_support.h"
#include "status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

absl::Status AdaCompEncodeShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(EncodeShape(c));
  int num_tensors;
  int num_moments;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  TF_RETURN_IF_ERROR(c->GetAttr("M", &num_moments));
  for (int i = 0; i < num_moments && num_moments == num_tensors; ++i) {
    ShapeHandle shape = c->input(num_tensors + i);
    TF_RETURN_IF_ERROR(
        MergeVariableShape(c, 2 * num_tensors + 1, i, "second moment", &shape));
  }
  ShapeHandle unused;
  return c->WithRankAtMost(c->input(2 * num_tensors + 1 + num_moments), 1, &unused);
}

absl::Status AccumulateShape(InferenceContext* c) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &shape));
  c->set_output(0, shape);
  c->set_output(1, shape);
  return absl::OkStatus();
}

absl::Status SelectShape(InferenceContext* c) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->input(1), &shape));
  int64_t bin_size;
  TF_RETURN_IF_ERROR(c->GetAttr("bin_size", &bin_size));
  const DimensionHandle size = c->NumElements(shape);
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(c->ValueKnown(size)
                                 ? c->MakeDim(CeilDiv(c->Value(size), bin_size))
                                 : c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status QuantizeShape(InferenceContext* c) {
  ShapeHandle positions;
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &positions));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
  c->set_output(0, positions);
  c->set_output(1, c->Scalar());
  c->set_output(2, c->input(0));
  return absl::OkStatus();
}

REGISTER_OP("ResidualAccumulate")
    .Input("residual: float")
    .Input("gradient: T")
    .Output("accumulated: float")
    .Output("boosted: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("scale_factor: float = 2.0")
    .SetShapeFn(AccumulateShape);

REGISTER_OP("LocalBinSelect")
    .Input("accumulated: float")
    .Input("boosted: float")
    .Output("positions: int64")
    .Output("bin_max: float")
    .Attr("bin_size: int >= 1")
    .SetShapeFn(SelectShape);

REGISTER_OP("TernaryQuantize")
    .Input("accumulated: float")
    .Input("positions: int64")
    .Input("bin_max: float")
    .Output("signs: int8")
    .Output("scale: float")
    .Output("residual: float")
    .SetShapeFn(QuantizeShape);

GRADCOMP_ENCODE_OP("AdaCompEncode")
    .Input("second_moments: M * resource")
    .Input("adam_step: int64")
    .Input("squares: S * float")
    .Input("bin_sizes: int64")
    .Attr("M: int >= 0")
    .Attr("S: int >= 0")
    .Attr("scale_factor: float = 2.0")
    .Attr("beta_2: float")
    .Attr("epsilon: float")
    .Attr("corrects_epsilon: bool")
    .Attr("scale: float")
    .SetShapeFn(WithSettings<CheckBinSizes, AdaCompEncodeShape>);
GRADCOMP_DECODE_OP("AdaCompDecode")
    .Input("bin_sizes: int64")
    .SetShapeFn(WithSettings<CheckBinSizes, DecodeShape>);
GRADCOMP_PUT_BACK_OP("AdaCompPutBack")
    .Input("bin_sizes: int64")
    .SetShapeFn(WithSettings<CheckBinSizes, PutBackShape>);

}  // namespace
}  // namespace gradcomp
