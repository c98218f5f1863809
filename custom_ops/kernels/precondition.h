// Adam's division by the root of the second moment, done by each replica before it compresses.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_PRECONDITION_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_PRECONDITION_H_

#include <cstdint>
#include <vector>

#include "common.h"
#include "floats.h"

namespace gradcomp {

struct PreconditionTensor {
  float* second_moment;  // updated in place
  const void* gradient;
  GradientType type;
  int64_t size;  // elements
  float* preconditioned;
};

struct AdamSettings {
  float beta_2;
  float epsilon;
  float scale;  // of the second moment: 1 / (1 - beta_2^step), times what is estimated by it
};

// second_moment += (1 - beta_2) * (gradient^2 - second_moment);
// preconditioned = gradient / (sqrt(scale * second_moment) + epsilon).
// Where any gradient is not finite, no second moment changes, and all become quiet NaN.
void Precondition(const std::vector<PreconditionTensor>& tensors, const AdamSettings& settings,
                  const ParallelFor& parallel_for);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_PRECONDITION_H_
