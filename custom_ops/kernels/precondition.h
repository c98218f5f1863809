// Adam's division by the root of the second moment, done by each replica before it compresses.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "floats.h"

namespace gradcomp {

struct AdamSettings {
  float beta_2;
  float epsilon;
  float scale;  // of the second moment: 1 / (1 - beta_2^step), times what is estimated by it
};

// A tensor, or some elements of one that follow each other.
struct PreconditionTensor {
  float* second_moment;  // updated in place; null: the gradient is not divided
  const void* gradient;
  GradientType type;
  int64_t size;  // elements
  float* preconditioned;
  const float* squares = nullptr;  // in place of the squares of `gradient`, if given
  AdamSettings adam = {};
};

// second_moment += (1 - beta_2) * (gradient^2 - second_moment);
// preconditioned = gradient / (sqrt(scale * second_moment) + epsilon).
// Where any gradient or square is not finite, no second moment changes, and all become quiet NaN.
void Precondition(const std::vector<PreconditionTensor>& tensors, const ParallelFor& parallel_for);

// The largest of the magnitudes of the gradients and of their squares, but for gradients below 1.
// Infinity or NaN if one of them is not finite.
float LargestMagnitude(const PreconditionTensor& tensor);

// Divides one tensor on this thread, for kernels that divide as they go. All of it must be finite.
void PreconditionFinite(const PreconditionTensor& tensor);

// Takes back what PreconditionFinite did. `preconditioned` becomes, to the bit, what it was then. A
// second moment is at least 0 and at most what it was; where beta_2 is a half or more, it is less by
// at most 2^-19 of what it had become.
void TakeBack(const PreconditionTensor& tensor);

}  // namespace gradcomp
