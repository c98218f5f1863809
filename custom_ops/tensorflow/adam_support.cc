#include "adam_support.h"

#include <cmath>

#include "op_support.h"

namespace gradcomp {

absl::Status AdamAttributes::Read(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("beta_2", &beta_2_));
  TF_RETURN_IF_ERROR(context->GetAttr("epsilon", &epsilon_));
  TF_RETURN_IF_ERROR(context->GetAttr("corrects_epsilon", &corrects_epsilon_));
  TF_RETURN_IF_ERROR(context->GetAttr("scale", &scale_));
  if (!(0 <= beta_2_ && beta_2_ < 1)) {
    return InvalidArgument("beta_2 is ", beta_2_, "; expected 0 or more, and less than 1");
  }
  if (!(epsilon_ > 0)) {
    return InvalidArgument("epsilon is ", epsilon_, "; expected a positive number");
  }
  if (!(scale_ > 0 && std::isfinite(scale_))) {
    return InvalidArgument("scale is ", scale_, "; expected a positive number");
  }
  return absl::OkStatus();
}

absl::Status AdamAttributes::At(OpKernelContext* context, int input, const char* name,
                                int num_gradients, std::vector<AdamSettings>* settings) const {
  const Tensor& steps = context->input(input);
  const bool for_all = steps.dims() == 0;
  if (!for_all && steps.shape() != TensorShape({num_gradients})) {
    return InvalidArgument(name, " has shape ", steps.shape().DebugString(),
                           "; expected a scalar, or one for each of ", num_gradients, " gradients");
  }
  for (int i = 0; i < num_gradients; ++i) {
    const int64_t step = steps.flat<int64_t>()(for_all ? 0 : i);
    if (step < 1) return InvalidArgument(name, " is ", step, "; expected 1 or more");
    settings->push_back(InStep(step));
  }
  return absl::OkStatus();
}

AdamSettings AdamAttributes::InStep(int64_t step) const {
  const double correction = 1 - std::pow(static_cast<double>(beta_2_), step);
  const double epsilon = corrects_epsilon_ ? epsilon_ / std::sqrt(correction) : epsilon_;
  return {beta_2_, static_cast<float>(epsilon), static_cast<float>(scale_ / correction)};
}

absl::Status SquaresInputs::Read(OpKernelConstruction* context, int num_gradients) {
  TF_RETURN_IF_ERROR(context->GetAttr("S", &num_squares_));
  if (num_squares_ == 0 || num_squares_ == num_gradients) return absl::OkStatus();
  return InvalidArgument(num_squares_, " squares for ", num_gradients,
                         " gradients; expected one for each gradient, or none");
}

absl::Status SquaresInputs::At(OpKernelContext* context, int first, int i,
                               const TensorShape& gradient, const float** squares) const {
  *squares = nullptr;
  if (num_squares_ == 0) return absl::OkStatus();
  const Tensor& input = context->input(first + i);
  if (input.NumElements() == 0) return absl::OkStatus();
  if (input.shape() != gradient) {
    return InvalidArgument("squares ", i, " have shape ", input.shape().DebugString(),
                           "; expected ", gradient.DebugString(), ", the shape of the gradient, or none");
  }
  *squares = input.flat<float>().data();
  return absl::OkStatus();
}

}  // namespace gradcomp
