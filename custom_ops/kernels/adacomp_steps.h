// The single steps of AdaComp, for custom methods. The encoder combines these steps.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "floats.h"

namespace gradcomp {

// accumulated = residual + gradient; boosted = accumulated + (scale_factor - 1) * gradient.
void AccumulateResidual(const float* residual, const void* gradient, GradientType type,
                        int64_t size, float scale_factor, const ParallelFor& parallel_for,
                        float* accumulated, float* boosted);

// Returns the elements to be sent, in ascending order. bin_max has a value for each bin. A bin with
// a value that is not finite selects nothing, and its maximum is infinite or NaN.
std::vector<int64_t> SelectInBins(const float* accumulated, const float* boosted, int64_t size,
                                  int64_t bin_size, const ParallelFor& parallel_for,
                                  float* bin_max);

// Returns the mean of the bin maxima; 0 without bins. The maxima are summed in double and in the
// order of the bins, so that every implementation gets the same bits. The mean is finite if and
// only if all maxima are.
float ScaleOf(const float* bin_max, int64_t num_bins);

// Describes in one sentence the first position that is not in [0, size), or not above the position
// before.
Status CheckPositions(const int64_t* positions, int64_t num_positions, int64_t size);

// Computes at the positions signs = sign(accumulated) and residual = accumulated - signs * scale.
void QuantizeTernary(const float* accumulated, int64_t size, const int64_t* positions,
                     int64_t num_positions, float scale, const ParallelFor& parallel_for,
                     int8_t* signs, float* residual);

}  // namespace gradcomp
