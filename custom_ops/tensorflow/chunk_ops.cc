// Registers the ops with their shape functions. tf_gradcomp/ops/chunks.py documents the ops.
#include <cstdint>
#include <optional>
#include <vector>

#include "../kernels/chunks.h"
#include "shape_support.h"
#include "status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

// The dimensions that all ops share.
struct Common {
  int num_tensors;  // the attribute N
  int own_input;    // the first
  DimensionHandle offsets;  // words; unknown if shapes or settings are unknown
  DimensionHandle values;   // elements, including the flag
  DimensionHandle whole;    // values of tensors that are sent whole
  DimensionHandle coded;    // values of the other tensors
  DimensionHandle scales;   // tensors with such values
};

absl::Status GetLengths(InferenceContext* c, const std::vector<int64_t>& chunk_sizes,
                        Common* common) {
  TF_RETURN_IF_ERROR(ToTensorFlow(CheckChunks(chunk_sizes, common->num_tensors)));
  std::vector<int64_t> sizes;
  if (!GetKnownSizes(c, common->num_tensors, &sizes)) return absl::OkStatus();
  const ChunkLayout layout(sizes, chunk_sizes);
  common->offsets = c->MakeDim(layout.num_words());
  common->values = c->MakeDim(layout.num_chunks() + 1);
  int64_t whole = 0;
  int64_t scales = 0;
  for (const ChunkLayout::Chunked& tensor : layout.tensors()) {
    if (tensor.chunk_size == 1) {
      whole += tensor.num_chunks;
    } else if (tensor.num_chunks > 0) {
      ++scales;
    }
  }
  common->whole = c->MakeDim(whole);
  common->coded = c->MakeDim(layout.num_chunks() - whole);
  common->scales = c->MakeDim(scales);
  return absl::OkStatus();
}

absl::Status CheckCommon(InferenceContext* c, Common* common) {
  TF_RETURN_IF_ERROR(c->GetAttr("N", &common->num_tensors));
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  const int first = 2 * common->num_tensors;
  *common = {common->num_tensors, first + 1,       c->UnknownDim(), c->UnknownDim(),
             c->UnknownDim(),     c->UnknownDim(), c->UnknownDim()};
  std::optional<std::vector<int64_t>> chunk_sizes;
  TF_RETURN_IF_ERROR(GetKnownSettings(c, first, &chunk_sizes));
  return chunk_sizes ? GetLengths(c, *chunk_sizes, common) : absl::OkStatus();
}

absl::Status OffsetsShape(InferenceContext* c) {
  Common common;
  TF_RETURN_IF_ERROR(CheckCommon(c, &common));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input), 0, &unused));
  c->set_output(0, c->Vector(common.offsets));
  if (c->num_outputs() > 1) c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status SplitShape(InferenceContext* c) {
  Common common;
  TF_RETURN_IF_ERROR(CheckCommon(c, &common));
  c->set_output(0, c->Vector(common.whole));
  c->set_output(1, c->Vector(common.coded));
  c->set_output(2, c->Vector(common.coded));
  c->set_output(3, c->Vector(common.scales));
  return absl::OkStatus();
}

absl::Status TakeShape(InferenceContext* c) {
  Common common;
  TF_RETURN_IF_ERROR(CheckCommon(c, &common));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input + 1), 0, &unused));
  c->set_output(0, c->Vector(common.values));
  return absl::OkStatus();
}

absl::Status ApplyShape(InferenceContext* c) {
  Common common;
  TF_RETURN_IF_ERROR(CheckCommon(c, &common));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input + 1), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input + 2), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input + 3), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(common.own_input + 4), 1, &unused));
  for (int i = 0; i < common.num_tensors; ++i) {
    c->set_output(i, c->input(common.num_tensors + i));
  }
  c->set_output(common.num_tensors, c->Scalar());
  return absl::OkStatus();
}

#define CHUNK_OP(name) GRADCOMP_RESIDUALS_OP(name).Input("chunk_sizes: int64")

CHUNK_OP("ChunkSelect")
    .Input("lead: bool")
    .Output("offsets: int32")
    .Output("finite: bool")
    .SetShapeFn(OffsetsShape);

CHUNK_OP("ChunkDraw")
    .Input("step: int64")
    .Output("offsets: int32")
    .SetShapeFn(OffsetsShape);

CHUNK_OP("ChunkSplit")
    .Output("whole: int32")
    .Output("coded: int32")
    .Output("scale_of: int32")
    .Output("counts: int64")
    .SetShapeFn(SplitShape);

CHUNK_OP("ChunkTake")
    .Input("offsets: int32")
    .Input("finite: bool")
    .Output("values: float")
    .SetShapeFn(TakeShape);

CHUNK_OP("ChunkApply")
    .Input("offsets: int32")
    .Input("totals: float")
    .Input("local_finite: bool")
    .Input("finite: bool")
    .Input("rests: float")
    .Output("reduced: N * float")
    .Output("all_finite: bool")
    .Attr("filter: float = 1.0")
    .SetShapeFn(ApplyShape);

}  // namespace
}  // namespace gradcomp
