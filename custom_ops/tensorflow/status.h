// Converts the kernels' errors to TensorFlow's.
#pragma once

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
