// What the shape functions share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {

// Merges what is known of the shape of the variable behind the input first + i into *shape; errors
// call it `name` i.
absl::Status MergeVariableShape(InferenceContext* c, int first, int i,
                                const char* name,
                                ShapeHandle* shape);

// For ops whose first inputs are N residuals and as many gradients: checks that they fit.
absl::Status CheckGradientShapes(InferenceContext* c);

// The settings of tensors in an input, if they are known while the graph is built.
absl::Status GetKnownSettings(InferenceContext* c, int input,
                              std::optional<std::vector<int64_t>>* settings);

// The elements of as many gradients, the inputs behind as many residuals. False: some are unknown.
bool GetKnownSizes(InferenceContext* c, int num_tensors,
                   std::vector<int64_t>* sizes);

// Adds to the shape function of an op, whose last input are settings, that they are checked, if they
// are known.
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

// Shape functions of <Method>Encode: N residuals, N gradients, the step and other inputs to payload
// and tensor_bytes.
absl::Status EncodeShape(InferenceContext* c);

// Of <Method>Decode: rows of payloads and step to N tensors of the attribute `shapes`, and finite.
absl::Status DecodeShape(InferenceContext* c);

// Of <Method>PutBack: N residuals and a payload.
absl::Status PutBackShape(InferenceContext* c);

}  // namespace gradcomp

// An op whose first inputs are N residuals and as many gradients.
#define GRADCOMP_RESIDUALS_OP(name)                           \
  REGISTER_OP(name)                                           \
      .Input("residuals: N * resource")                       \
      .Input("gradients: Tgradients")                         \
      .Attr("N: int >= 1")                                    \
      .Attr("Tgradients: list({float, half, bfloat16}) >= 1") \
      .SetIsStateful()

// Each takes the method's own inputs and attributes behind it, the main settings last of the inputs,
// and then EncodeShape, DecodeShape or PutBackShape, with settings in WithSettings.
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
