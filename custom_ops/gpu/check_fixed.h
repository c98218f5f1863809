// The check of a method whose payloads have a fixed length.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_CHECK_FIXED_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_CHECK_FIXED_H_

#include "fixed_on_gpu.h"
#include "kernels_on_gpu.h"

namespace gradcomp {

struct CheckedMethod {
  const char* name;
  Method method;
  EncodeOnGpu* encode;
  DecodeOnGpu* decode;
};

// Payloads, residuals and sums, and that what is not finite is found out.
Status CheckFixed(const CheckedMethod& method, const Codecs& codecs, DriverQueue* queue);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_CHECK_FIXED_H_
