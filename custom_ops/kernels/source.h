// A replica's residual and gradient of a tensor.
#pragma once

#include <cstdint>

#include "floats.h"

namespace gradcomp {

struct Source {
  float* residual;  // some functions update it in place
  const void* gradient;  // null: zeros
  GradientType type;
};

// Computes sums[i] = residual[begin + i] + gradient[begin + i].
void Accumulate(const Source& source, int64_t begin, int64_t size, float* sums);

}  // namespace gradcomp
