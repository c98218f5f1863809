// Registers the ops with their shape functions. tf_gradcomp/ops/leader_selection.py documents the
// ops.
#include <cstdint>
#include <optional>
#include <vector>

#include "../kernels/leader_selection.h"
#include "shape_support.h"
#include "status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

// The lengths of vectors; unknown if shapes or entries are unknown.
struct LeaderLengths {
  DimensionHandle place_words;
  DimensionHandle values;
};

absl::Status GetLeaderLengths(InferenceContext* c, int num_tensors, LeaderLengths* lengths) {
  *lengths = {c->UnknownDim(), c->UnknownDim()};
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  std::optional<std::vector<int64_t>> entries;
  TF_RETURN_IF_ERROR(GetKnownSettings(c, 2 * num_tensors, &entries));
  if (!entries) return absl::OkStatus();
  std::vector<int64_t> sizes;
  if (!GetKnownSizes(c, num_tensors, &sizes)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(ToTensorFlow(CheckEntries(sizes, *entries)));
  const LeaderLayout layout(sizes, *entries);
  *lengths = {c->MakeDim(layout.num_place_words()), c->MakeDim(layout.num_values())};
  return absl::OkStatus();
}

// Also checks the ranks of an op's own inputs.
absl::Status CheckLeaderInputs(InferenceContext* c, const std::vector<int>& own_ranks,
                               int* num_tensors, LeaderLengths* lengths) {
  TF_RETURN_IF_ERROR(c->GetAttr("N", num_tensors));
  TF_RETURN_IF_ERROR(GetLeaderLengths(c, *num_tensors, lengths));
  for (size_t i = 0; i < own_ranks.size(); ++i) {
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * *num_tensors + 1 + i), own_ranks[i], &unused));
  }
  return absl::OkStatus();
}

absl::Status LeaderSelectShape(InferenceContext* c) {
  int num_tensors;
  LeaderLengths lengths;
  TF_RETURN_IF_ERROR(CheckLeaderInputs(c, {0}, &num_tensors, &lengths));
  c->set_output(0, c->Vector(lengths.place_words));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status LeaderTakeShape(InferenceContext* c) {
  int num_tensors;
  LeaderLengths lengths;
  TF_RETURN_IF_ERROR(CheckLeaderInputs(c, {1, 0}, &num_tensors, &lengths));
  c->set_output(0, c->Vector(lengths.values));
  return absl::OkStatus();
}

absl::Status LeaderApplyShape(InferenceContext* c) {
  int num_tensors;
  LeaderLengths lengths;
  TF_RETURN_IF_ERROR(CheckLeaderInputs(c, {1, 1, 1, 0, 0}, &num_tensors, &lengths));
  for (int i = 0; i < num_tensors; ++i) c->set_output(i, c->input(num_tensors + i));
  c->set_output(num_tensors, c->Scalar());
  return absl::OkStatus();
}

#define LEADER_OP(name) GRADCOMP_RESIDUALS_OP(name).Input("entries: int64")

LEADER_OP("LeaderSelect")
    .Input("lead: bool")
    .Output("places: int32")
    .Output("finite: bool")
    .Attr("order: {'value', 'index', 'magnitude'}")
    .SetShapeFn(LeaderSelectShape);

LEADER_OP("LeaderTake")
    .Input("places: int32")
    .Input("finite: bool")
    .Output("values: float")
    .SetShapeFn(LeaderTakeShape);

LEADER_OP("LeaderApply")
    .Input("places: int32")
    .Input("totals: float")
    .Input("rests: float")
    .Input("own_finite: bool")
    .Input("finite: bool")
    .Output("reduced: N * float")
    .Output("all_finite: bool")
    .SetShapeFn(LeaderApplyShape);

}  // namespace
}  // namespace gradcomp
