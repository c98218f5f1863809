// SIDCo's choice of the largest entries: those above a threshold that is estimated without a sort
// (Abdelmoniem et al., MLSys 2021, arXiv 2101.10761).
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"

namespace gradcomp {

enum class MagnitudeFit { kPareto, kExponential };

struct SidcoSettings {
  double density;  // the target share of chosen entries, above 0 and below 1
  int64_t stages;  // fits, 1 or more
  MagnitudeFit fit;
};

// Describes in one sentence the first setting that is out of range.
Status CheckSidco(const SidcoSettings& settings);

// Returns the places of the chosen entries, ascending. `size` is below 2^31. No place of a zero is
// chosen. tests/reference/sidco.py computes the same in NumPy.
std::vector<int32_t> ChooseBySidco(const SidcoSettings& settings, const float* values, int64_t size,
                                   const ParallelFor& parallel_for);

}  // namespace gradcomp
