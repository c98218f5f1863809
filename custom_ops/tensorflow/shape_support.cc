#include "shape_support.h"

#include <cstdint>
#include <vector>

#include "status.h"
#include "tensorflow/core/framework/types.h"

namespace gradcomp {

using ::tensorflow::DataType;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

absl::Status MergeVariableShape(InferenceContext* c, int input, ShapeHandle* shape) {
  const auto* handle = c->input_handle_shapes_and_types(input);
  if (handle == nullptr || handle->empty()) return absl::OkStatus();
  const DataType dtype = handle->front().dtype;
  if (dtype != tensorflow::DT_FLOAT && dtype != tensorflow::DT_INVALID) {
    return InvalidArgument("residual ", input, " is a variable of ", DataTypeString(dtype),
                           "; expected float32, whatever the type of the gradient");
  }
  return c->Merge(handle->front().shape, *shape, shape);
}

absl::Status CheckGradientShapes(InferenceContext* c) {
  int64_t num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  std::vector<DataType> types;
  TF_RETURN_IF_ERROR(c->GetAttr("Tgradients", &types));
  if (static_cast<int64_t>(types.size()) != num_tensors) {
    return InvalidArgument(types.size(), " gradients for ", num_tensors,
                           " residuals; expected one gradient for each residual");
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    ShapeHandle shape = c->input(num_tensors + i);
    TF_RETURN_IF_ERROR(MergeVariableShape(c, i, &shape));
  }
  return absl::OkStatus();
}

}  // namespace gradcomp
