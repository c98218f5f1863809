// What the shape functions share.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_SHAPE_SUPPORT_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_SHAPE_SUPPORT_H_

#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {

// Merges what is known of the shape of the variable behind the input first + i into *shape; errors
// call it `name` i.
absl::Status MergeVariableShape(tensorflow::shape_inference::InferenceContext* c, int first, int i,
                                const char* name,
                                tensorflow::shape_inference::ShapeHandle* shape);

// For ops whose first inputs are N residuals and as many gradients: checks that they fit.
absl::Status CheckGradientShapes(tensorflow::shape_inference::InferenceContext* c);

// Shape functions of <Method>Encode: N residuals, N gradients and scalars to payload and
// tensor_bytes.
absl::Status EncodeShape(tensorflow::shape_inference::InferenceContext* c);

// Of <Method>Decode: rows of payloads and step to N tensors of the attribute `shapes`, and finite.
absl::Status DecodeShape(tensorflow::shape_inference::InferenceContext* c);

// Of <Method>PutBack: N residuals and a payload.
absl::Status PutBackShape(tensorflow::shape_inference::InferenceContext* c);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_SHAPE_SUPPORT_H_
