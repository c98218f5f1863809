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
  float scale;  // factor of the second moment: 1 / (1 - beta_2^step), times the number of replicas
};

// A tensor, or some consecutive elements of a tensor.
struct PreconditionTensor {
  float* second_moment;  // updated in place; null: the gradient is not divided
  const void* gradient;
  GradientType type;
  int64_t size;  // elements
  float* preconditioned;
  const float* squares = nullptr;  // replaces the squares of `gradient`, if given
  AdamSettings adam = {};
};

// second_moment += (1 - beta_2) * (gradient^2 - second_moment);
// preconditioned = gradient / (sqrt(scale * second_moment) + epsilon).
// If any gradient or square is not finite, no second moment changes, and all outputs become quiet
// NaN.
void Precondition(const std::vector<PreconditionTensor>& tensors, const ParallelFor& parallel_for);

// Returns the largest magnitude of the gradients and their squares, if it is at least 1. Infinity
// or NaN if a value is not finite.
float LargestMagnitude(const PreconditionTensor& tensor);

// Divides a tensor on this thread, for kernels that divide block by block. All values must be
// finite.
void PreconditionFinite(const PreconditionTensor& tensor);

// Reverts the second moments of PreconditionFinite, and computes the same bits of `preconditioned`
// again. A reverted second moment is between 0 and its old value. If beta_2 is at least a half, it
// is lower than its old value by at most 2^-19 of its updated value.
void TakeBack(const PreconditionTensor& tensor);

}  // namespace gradcomp
