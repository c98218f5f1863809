// Helpers of the shape functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {

// Merges the known shape of the variable of input first + i into *shape; errors call the variable
// `name` i.
absl::Status MergeVariableShape(InferenceContext* c, int first, int i,
                                const char* name,
                                ShapeHandle* shape);

// Checks the shapes of gradients, for ops whose first inputs are N residuals and as many gradients.
absl::Status CheckGradientShapes(InferenceContext* c);

// Gets the settings of tensors from an input, if they are known when the graph is built.
absl::Status GetKnownSettings(InferenceContext* c, int input,
                              std::optional<std::vector<int64_t>>* settings);

// Gets the numbers of elements of gradients, which are the inputs after as many residuals. Returns
// false if some are unknown.
bool GetKnownSizes(InferenceContext* c, int num_tensors,
                   std::vector<int64_t>* sizes);

// Extends the shape function of an op with a check of its last input, the settings, if they are
// known.
template <Status (*check)(const std::vector<int64_t>& settings, int64_t num_tensors),
          absl::Status (*shape_function)(InferenceContext*)>
absl::Status WithSettings(InferenceContext* c) {
  int64_t num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  std::optional<std::vector<int64_t>> settings;
  TF_RETURN_IF_ERROR(GetKnownSettings(c, c->num_inputs() - 1, &settings));
  if (settings) TF_RETURN_IF_ERROR(ToTensorFlow(check(*settings, num_tensors)));
  return shape_function(c);
}

// The shape function of <Method>Encode, from N residuals, N gradients, the step and other inputs to
// payload and tensor_bytes.
absl::Status EncodeShape(InferenceContext* c);

// The shape function of <Method>Decode, from rows of payloads and the step to N tensors of the
// attribute `shapes`, and finite.
absl::Status DecodeShape(InferenceContext* c);

// The shape function of <Method>PutBack, with inputs of N residuals and a payload.
absl::Status PutBackShape(InferenceContext* c);

}  // namespace gradcomp

// Registers an op whose first inputs are N residuals and as many gradients.
#define GRADCOMP_RESIDUALS_OP(name)                           \
  REGISTER_OP(name)                                           \
      .Input("residuals: N * resource")                       \
      .Input("gradients: Tgradients")                         \
      .Attr("N: int >= 1")                                    \
      .Attr("Tgradients: list({float, half, bfloat16}) >= 1") \
      .SetIsStateful()

// Each macro is followed by the method's own inputs and attributes, where the main settings are the
// last input, and then by EncodeShape, DecodeShape or PutBackShape, in WithSettings if the method
// has settings.
#define GRADCOMP_ENCODE_OP(name)       \
  GRADCOMP_RESIDUALS_OP(name)          \
      .Input("step: int64")            \
      .Output("payload: int32")        \
      .Output("tensor_bytes: int64")   \
      .Attr("fingerprint: int")

#define GRADCOMP_DECODE_OP(name)       \
  REGISTER_OP(name)                    \
      .Input("payloads: int32")        \
      .Input("step: int64")            \
      .Output("reduced: N * float")    \
      .Output("finite: bool")          \
      .Attr("N: int >= 1")             \
      .Attr("shapes: list(shape)")     \
      .Attr("fingerprint: int")

#define GRADCOMP_PUT_BACK_OP(name)            \
  REGISTER_OP(name)                           \
      .Input("residuals: N * resource")       \
      .Input("payload: int32")                \
      .Attr("N: int >= 1")                    \
      .Attr("fingerprint: int")               \
      .SetIsStateful()
