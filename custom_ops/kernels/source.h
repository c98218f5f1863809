// What a replica has of one tensor: its residual and its gradient.
#pragma once

#include <cstdint>

#include "floats.h"

namespace gradcomp {

struct Source {
  float* residual;  // of some functions updated in place
  const void* gradient;
  GradientType type;
};

// sums[i] = residual[begin + i] + gradient[begin + i].
void Accumulate(const Source& source, int64_t begin, int64_t size, float* sums);

}  // namespace gradcomp
