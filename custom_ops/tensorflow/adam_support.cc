#include "adam_support.h"

#include <cmath>

#include "op_support.h"

namespace gradcomp {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

absl::Status AdamAttributes::Read(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("beta_2", &beta_2_));
  TF_RETURN_IF_ERROR(context->GetAttr("epsilon", &epsilon_));
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
                                AdamSettings* settings) const {
  int64_t step = 0;
  TF_RETURN_IF_ERROR(GetScalar(context, input, name, &step));
  if (step < 1) return InvalidArgument(name, " is ", step, "; expected 1 or more");
  const double correction = 1 - std::pow(static_cast<double>(beta_2_), step);
  *settings = {beta_2_, epsilon_, static_cast<float>(scale_ / correction)};
  return absl::OkStatus();
}

}  // namespace gradcomp
