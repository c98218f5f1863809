#include "shape_support.h"

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace gradcomp {

using ::tensorflow::DataType;
absl::Status MergeVariableShape(InferenceContext* c, int first, int i, const char* name,
                                ShapeHandle* shape) {
  const auto* handle = c->input_handle_shapes_and_types(first + i);
  if (handle == nullptr || handle->empty()) return absl::OkStatus();
  const DataType dtype = handle->front().dtype;
  if (dtype != tensorflow::DT_FLOAT && dtype != tensorflow::DT_INVALID) {
    return InvalidArgument(name, " ", i, " is a variable of ", DataTypeString(dtype),
                           "; expected float32 for every type of gradient");
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
    TF_RETURN_IF_ERROR(MergeVariableShape(c, 0, i, "residual", &shape));
  }
  return absl::OkStatus();
}

absl::Status GetKnownSettings(InferenceContext* c, int input,
                              std::optional<std::vector<int64_t>>* settings) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(input), 1, &unused));
  const Tensor* known = c->input_tensor(input);
  if (known == nullptr) return absl::OkStatus();
  const auto values = known->vec<int64_t>();
  settings->emplace(values.data(), values.data() + values.size());
  return absl::OkStatus();
}

bool GetKnownSizes(InferenceContext* c, int num_tensors, std::vector<int64_t>* sizes) {
  for (int i = 0; i < num_tensors; ++i) {
    const auto size = c->NumElements(c->input(num_tensors + i));
    if (!c->ValueKnown(size)) return false;
    sizes->push_back(c->Value(size));
  }
  return true;
}

absl::Status EncodeShape(InferenceContext* c) {
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  TF_RETURN_IF_ERROR(CheckGradientShapes(c));
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * num_tensors), 0, &unused));
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector(num_tensors));
  return absl::OkStatus();
}

absl::Status DecodeShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  std::vector<TensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  if (shapes.size() != num_tensors) {
    return InvalidArgument("shapes has ", shapes.size(), " entries; expected ", num_tensors,
                           ": give one shape for each tensor");
  }
  for (int i = 0; i < num_tensors; ++i) {
    ShapeHandle shape;
    TF_RETURN_IF_ERROR(c->MakeShapeFromTensorShape(shapes[i], &shape));
    c->set_output(i, shape);
  }
  c->set_output(num_tensors, c->Scalar());
  return absl::OkStatus();
}

absl::Status PutBackShape(InferenceContext* c) {
  int num_tensors;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &num_tensors));
  for (int i = 0; i < num_tensors; ++i) {
    ShapeHandle shape = c->UnknownShape();
    TF_RETURN_IF_ERROR(MergeVariableShape(c, 0, i, "residual", &shape));
  }
  ShapeHandle unused;
  return c->WithRank(c->input(num_tensors), 1, &unused);
}

}  // namespace gradcomp
