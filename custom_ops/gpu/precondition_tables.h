// The arguments of the kernels that divide by second moments. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_PRECONDITION_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_PRECONDITION_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

struct DividedTensor {
  float* second_moment;  // updated in place
  const void* gradient;
  const float* squares;  // replaces the gradient's squares, if given
  float* preconditioned;
  int gradient_type;     // GradientType: float, half, bfloat16
  long long size;        // elements
  long long first_slice;
  Adam adam;
};

// The arguments of the kernels.
struct PreconditionStep {
  const DividedTensor* tensors;
  long long num_tensors;
  int* not_finite;  // 0 before the first launch
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_PRECONDITION_TABLES_H_
