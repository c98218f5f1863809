// Errors of the kernels as TensorFlow has them.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_STATUS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_STATUS_H_

#include "../kernels/common.h"
#include "absl/status/status.h"
#include "names.h"

namespace gradcomp {

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(Concat(parts...));
}

inline absl::Status ToTensorFlow(const Status& status) {
  return status.ok() ? absl::OkStatus() : InvalidArgument(status.message);
}

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_STATUS_H_
