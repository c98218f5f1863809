// The steps of AdaComp one by one, for a method of one's own. The encoder does them together.
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

// Elements to be sent, in ascending order. bin_max has one place per bin. A bin with a value that
// is not finite selects nothing and has an infinite or NaN maximum.
std::vector<int64_t> SelectInBins(const float* accumulated, const float* boosted, int64_t size,
                                  int64_t bin_size, const ParallelFor& parallel_for,
                                  float* bin_max);

// The mean of the bin maxima: summed in double and in bin order, so that every implementation gets
// the same bits. It is finite exactly if all maxima are. 0 without bins.
float ScaleOf(const float* bin_max, int64_t num_bins);

// One sentence on the first position that is not in [0, size) or not above the one before.
Status CheckPositions(const int64_t* positions, int64_t num_positions, int64_t size);

// signs = sign(accumulated) at the positions; residual = accumulated - signs * scale there.
void QuantizeTernary(const float* accumulated, int64_t size, const int64_t* positions,
                     int64_t num_positions, float scale, const ParallelFor& parallel_for,
                     int8_t* signs, float* residual);

}  // namespace gradcomp
