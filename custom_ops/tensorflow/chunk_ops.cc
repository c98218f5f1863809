// The ops and their shapes. What they compute: tf_gradcomp/ops/chunks.py.
#include <cstdint>
#include <vector>

#include "../kernels/chunks.h"
#include "shape_support.h"
#include "status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

// What all of them have in common. *num_tensors is their attribute N.
absl::Status CheckCommon(InferenceContext* c, int* num_tensors) {
  TF_RETURN_IF_ERROR(c->GetAttr("N", num_tensors));
  std::vector<int64_t> chunk_sizes;
  TF_RETURN_IF_ERROR(c->GetAttr("chunk_sizes", &chunk_sizes));
  std::vector<int64_t> groups;
  TF_RETURN_IF_ERROR(c->GetAttr("groups", &groups));
  TF_RETURN_IF_ERROR(ToTensorFlow(CheckChunks(chunk_sizes, groups, *num_tensors)));
  return CheckGradientShapes(c);
}

absl::Status OffsetsShape(InferenceContext* c) {
  int num_tensors;
  TF_RETURN_IF_ERROR(CheckCommon(c, &num_tensors));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors), 0, &unused));
  c->set_output(0, c->Vector(c->UnknownDim()));
  if (c->num_outputs() > 1) c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status TakeShape(InferenceContext* c) {
  int num_tensors;
  TF_RETURN_IF_ERROR(CheckCommon(c, &num_tensors));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors + 1), 0, &unused));
  c->set_output(0, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status ApplyShape(InferenceContext* c) {
  int num_tensors;
  TF_RETURN_IF_ERROR(CheckCommon(c, &num_tensors));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors + 1), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors + 2), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors + 3), 0, &unused));
  for (int i = 0; i < num_tensors; ++i) c->set_output(i, c->input(num_tensors + i));
  c->set_output(num_tensors, c->Scalar());
  return absl::OkStatus();
}

#define CHUNK_OP(name)                                     \
  REGISTER_OP(name)                                        \
      .Attr("N: int >= 1")                                 \
      .Attr("Tgradients: list({float, half, bfloat16}) >= 1") \
      .Attr("chunk_sizes: list(int)")                      \
      .Attr("groups: list(int)")                           \
      .Input("residuals: N * resource")                    \
      .Input("gradients: Tgradients")                      \
      .SetIsStateful()

CHUNK_OP("ChunkSelect")
    .Input("lead: bool")
    .Output("offsets: int32")
    .Output("finite: bool")
    .SetShapeFn(OffsetsShape);

CHUNK_OP("ChunkDraw")
    .Input("step: int64")
    .Output("offsets: int32")
    .Attr("seed: int")
    .SetShapeFn(OffsetsShape);

CHUNK_OP("ChunkTake")
    .Input("offsets: int32")
    .Input("finite: bool")
    .Output("values: float")
    .SetShapeFn(TakeShape);

CHUNK_OP("ChunkApply")
    .Input("offsets: int32")
    .Input("totals: float")
    .Input("own_finite: bool")
    .Input("finite: bool")
    .Output("reduced: N * float")
    .Output("all_finite: bool")
    .Attr("filter: float = 1.0")
    .SetShapeFn(ApplyShape);

}  // namespace
}  // namespace gradcomp
