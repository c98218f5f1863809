// Count sketches: rows of sums of random entries with random signs, and the entries that are large
// by these sums (Charikar et al., "Finding Frequent Items in Data Streams", 2002).
#pragma once

#include <cstdint>

#include "common.h"

namespace gradcomp {

inline constexpr int64_t kSketchRows = 3;

// Entry i has in row r the column and the sign of word i of Philox 4x32-10 with the key 0 and the
// counters from (r * 2^40, step) on.
struct SketchSettings {
  int64_t step;
  int64_t columns;
};

// Describes in one sentence a number of columns that is out of range.
Status CheckSketch(const SketchSettings& settings);

// Writes the sums, row by row. The entries are added in their order.
void Sketch(const SketchSettings& settings, const float* values, int64_t size,
            const ParallelFor& parallel_for, float* sums);

// Writes the places of the entries whose estimates have the largest magnitudes, in descending
// order; among equal magnitudes, the first. An estimate is the median over the three rows of the entry's
// sum with its sign. A sum of NaN counts as infinite. `estimates` is memory for `size` floats.
void LargestOfSketch(const SketchSettings& settings, const float* sums, int64_t size,
                     int64_t count, const ParallelFor& parallel_for, float* estimates,
                     int32_t* places);

}  // namespace gradcomp
