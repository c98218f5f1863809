// Local clipping and momentum correction of Deep Gradient Compression, applied to gradients before
// they are accumulated (Lin et al. 2018, section 3.2).
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

// Returns the factor that limits the common norm of all gradients to `clip_norm`. Squares are
// summed in double and in a fixed order, so that every implementation gets the same bits. An
// infinite `clip_norm` does not clip.
float ClipScale(const std::vector<MomentumTensor>& tensors, float clip_norm,
                const ParallelFor& parallel_for);

// Computes corrected = scale * gradient + momentum * velocity for each tensor.
void CorrectMomentum(const std::vector<MomentumTensor>& tensors, float scale, float momentum,
                     const ParallelFor& parallel_for);

}  // namespace gradcomp
