// What Deep Gradient Compression does with gradients before they are accumulated: local clipping and
// momentum correction (Lin et al. 2018, section 3.2).
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "floats.h"

namespace gradcomp {

struct MomentumTensor {
  const float* velocity;  // null without momentum
  const void* gradient;
  GradientType type;
  int64_t size;  // elements
  float* corrected;
};

// What gradients are multiplied by, so that the norm of all of them together is at most `clip_norm`.
// Squares are summed in double and in a fixed order, so that every implementation gets the same bits.
// An infinite `clip_norm` does not clip.
float ClipScale(const std::vector<MomentumTensor>& tensors, float clip_norm,
                const ParallelFor& parallel_for);

// corrected = scale * gradient + momentum * velocity, of each tensor.
void CorrectMomentum(const std::vector<MomentumTensor>& tensors, float scale, float momentum,
                     const ParallelFor& parallel_for);

}  // namespace gradcomp
