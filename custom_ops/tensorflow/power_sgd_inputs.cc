#include "power_sgd_inputs.h"

#include <algorithm>
#include <limits>

namespace gradcomp {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::TensorShape;

namespace {

int64_t ColumnsOf(const TensorShape& shape) {
  return shape.dims() == 0 ? 1 : shape.dim_size(shape.dims() - 1);
}

int64_t RowsOf(const TensorShape& shape) {
  return shape.num_elements() == 0 ? 0 : shape.num_elements() / ColumnsOf(shape);
}

}  // namespace

absl::Status PowerSgdInputs::ReadAttributes(OpKernelConstruction* context, bool has_factors,
                                            int num_own_inputs) {
  has_factors_ = has_factors;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
  const int num_others = own_index(num_own_inputs) - 2 * num_tensors_ + 1;
  return CheckOneGradientEach(context, num_tensors_, num_others);
}

absl::Status PowerSgdInputs::Begin(OpKernelContext* context, Work* work) const {
  TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, "ranks", &work->ranks));
  TF_RETURN_IF_ERROR(ToTensorFlow(CheckRanks(work->ranks, num_tensors_)));
  const int num_factors = has_factors_ ? num_tensors_ : 0;
  TF_RETURN_IF_ERROR(
      work->variables.Lock(context, {{0, num_tensors_, "residual"},
                                     {2 * num_tensors_, num_factors, "factor"}}));
  TF_RETURN_IF_ERROR(CheckGradientShapes(context, work->variables, num_tensors_));
  for (int i = 0; i < num_tensors_; ++i) {
    const TensorShape& shape = work->variables.shape(i);
    TF_RETURN_IF_ERROR(
        ToTensorFlow(CheckRank(i, work->ranks[i], RowsOf(shape), ColumnsOf(shape))));
  }
  return has_factors_ ? CheckFactors(*work) : absl::OkStatus();
}

// A factor may have more columns than the rank; of a tensor that is sent whole, also none at all.
absl::Status PowerSgdInputs::CheckFactors(const Work& work) const {
  for (int i = 0; i < num_tensors_; ++i) {
    const int64_t rank = work.ranks[i];
    const int64_t columns = ColumnsOf(work.variables.shape(i));
    const TensorShape& shape = work.variables.shape(num_tensors_ + i);
    if (rank == 0 && shape == TensorShape({0})) continue;
    if (shape.dims() == 2 && shape.dim_size(0) == columns && shape.dim_size(1) >= rank) continue;
    return InvalidArgument("factor ", i, " has shape ", shape.DebugString(), "; expected [",
                           columns, ",", rank, "], or more columns", rank == 0 ? ", or [0]" : "");
  }
  return absl::OkStatus();
}

PowerSgdTensor PowerSgdInputs::TensorOf(const Work& work, int i, const Source& source) const {
  const TensorShape& shape = work.variables.shape(i);
  int64_t factor_columns = 0;
  if (has_factors_ && work.variables.shape(num_tensors_ + i).dims() == 2) {
    factor_columns = work.variables.shape(num_tensors_ + i).dim_size(1);
  }
  return {source.residual, source.gradient, source.type,   RowsOf(shape),
          ColumnsOf(shape), work.ranks[i],  factor_columns};
}

std::vector<PowerSgdTensor> PowerSgdInputs::Tensors(OpKernelContext* context,
                                                    const Work& work) const {
  std::vector<PowerSgdTensor> tensors;
  const std::vector<Source> sources = SourcesOf(context, work.variables, num_tensors_);
  for (int i = 0; i < num_tensors_; ++i) tensors.push_back(TensorOf(work, i, sources[i]));
  return tensors;
}

absl::Status PowerSgdInputs::TensorsOnHost(Work* work, bool writes, HostTensors* host,
                                           std::vector<PowerSgdTensor>* tensors,
                                           std::vector<float*>* factors) const {
  std::vector<float*> variables;
  TF_RETURN_IF_ERROR(host->Variables(&work->variables, writes, &variables));
  for (int i = 0; i < num_tensors_; ++i) {
    const tensorflow::Tensor* gradient;
    TF_RETURN_IF_ERROR(host->Input(num_tensors_ + i, &gradient));
    const GradientType type = ToGradientType(gradient->dtype());
    tensors->push_back(TensorOf(*work, i, {variables[i], gradient->data(), type}));
  }
  factors->assign(variables.begin() + num_tensors_, variables.end());
  return absl::OkStatus();
}

absl::Status PowerSgdInputs::GetVector(OpKernelContext* context, int own_input, const char* name,
                                       int64_t size, const float** values) const {
  const tensorflow::Tensor& tensor = context->input(own_index(own_input));
  if (tensor.shape() != TensorShape({size})) {
    return InvalidArgument(name, " has shape ", tensor.shape().DebugString(), "; expected [", size,
                           "] for these tensors and ranks");
  }
  *values = tensor.flat<float>().data();
  return absl::OkStatus();
}

absl::Status PowerSgdLeftInputs::Read(OpKernelContext* context, Step* step) const {
  TF_RETURN_IF_ERROR(GetScalar(context, own_index(0), "step", &step->step));
  TF_RETURN_IF_ERROR(Begin(context, &step->work));
  const PowerSgd method(Tensors(context, step->work), ThreadPool(context));
  tensorflow::Tensor* left;
  tensorflow::Tensor* finite;
  TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, method.left_size(), &left));
  TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({}), &finite));
  step->left = left->flat<float>().data();
  step->finite = finite->flat<bool>().data();
  return absl::OkStatus();
}

absl::Status PowerSgdLeftInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<PowerSgdTensor> tensors;
  std::vector<float*> factors;
  TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, /*writes=*/false, &host, &tensors, &factors));
  const PowerSgd method(tensors, ThreadPool(context));
  const std::vector<float> start = method.Start({factors.begin(), factors.end()}, step->step);
  *step->finite = method.ComputeLeft(start, step->left);
  return host.Finish();
}

absl::Status PowerSgdRightInputs::Read(OpKernelContext* context, Step* step) const {
  TF_RETURN_IF_ERROR(Begin(context, &step->work));
  const PowerSgd method(Tensors(context, step->work), ThreadPool(context));
  const float* sum = nullptr;
  TF_RETURN_IF_ERROR(GetVector(context, 0, "left_sum", method.left_size(), &sum));
  tensorflow::Tensor* left;
  tensorflow::Tensor* right;
  tensorflow::Tensor* finite;
  TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
      {own_index(0)}, 0, TensorShape({method.left_size()}), &left));
  TF_RETURN_IF_ERROR(AllocateOnHost(context, 1, method.right_size(), &right));
  TF_RETURN_IF_ERROR(context->allocate_output(2, TensorShape({}), &finite));
  step->left = left->flat<float>().data();
  step->right = right->flat<float>().data();
  if (step->left != sum) std::copy_n(sum, method.left_size(), step->left);
  step->finite = method.Orthonormalize(step->left);
  finite->scalar<bool>()() = step->finite;
  if (!step->finite) std::fill_n(step->right, method.right_size(), 0.0f);
  return absl::OkStatus();
}

absl::Status PowerSgdRightInputs::OnHost(OpKernelContext* context, Step* step) const {
  if (!step->finite) return absl::OkStatus();
  HostTensors host(context);
  std::vector<PowerSgdTensor> tensors;
  std::vector<float*> factors;
  TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, /*writes=*/false, &host, &tensors, &factors));
  const PowerSgd method(tensors, ThreadPool(context));
  method.ComputeRight(step->left, step->right);
  method.FlagProducts(step->right);
  return host.Finish();
}

absl::Status PowerSgdReduceInputs::Read(OpKernelContext* context, Step* step) const {
  TF_RETURN_IF_ERROR(Begin(context, &step->work));
  const PowerSgd method(Tensors(context, step->work), ThreadPool(context));
  const int64_t right_size = method.right_size();
  TF_RETURN_IF_ERROR(GetVector(context, 0, "left", method.left_size(), &step->left));
  TF_RETURN_IF_ERROR(GetVector(context, 1, "right", right_size, &step->right));
  TF_RETURN_IF_ERROR(GetVector(context, 2, "right_sum", right_size, &step->right_sum));
  TF_RETURN_IF_ERROR(GetScalar(context, own_index(3), "keep", &step->keep));
  TF_RETURN_IF_ERROR(GetScalar(context, own_index(4), "finite", &step->finite));
  step->finite = step->finite && method.CanMultiply(step->right_sum);
  tensorflow::Tensor* all_finite;
  TF_RETURN_IF_ERROR(context->allocate_output(num_tensors(), TensorShape({}), &all_finite));
  all_finite->scalar<bool>()() = step->finite;
  return absl::OkStatus();
}

absl::Status PowerSgdReduceInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<PowerSgdTensor> tensors;
  std::vector<float*> factors;
  TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, /*writes=*/true, &host, &tensors, &factors));
  std::vector<float*> reduced(num_tensors());
  for (int i = 0; i < num_tensors(); ++i) {
    const TensorShape& shape = step->work.variables.shape(i);
    TF_RETURN_IF_ERROR(host.Output(i, shape, &reduced[i], /*in_place_of=*/num_tensors() + i));
  }
  const PowerSgd method(tensors, ThreadPool(context));
  if (step->finite) {
    method.Reduce(step->left, step->right, step->right_sum, reduced);
    method.StoreFactors(step->right_sum, factors);
    return host.Finish();
  }
  if (step->keep) method.Keep(method.TooLarge(step->left, step->right_sum));
  for (int i = 0; i < num_tensors(); ++i) {
    std::fill_n(reduced[i], step->work.variables.shape(i).num_elements(), 0.0f);
  }
  return host.Finish();
}

}  // namespace gradcomp
