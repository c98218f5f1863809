// SIDCo's choice of the largest entries: those above a threshold that is estimated without a sort
// (Abdelmoniem et al., MLSys 2021, arXiv 2101.10761).
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"

namespace gradcomp {

// Describes in one sentence a target share of chosen entries that is out of range.
Status CheckDensity(double density);

// Returns the places of the chosen entries, ascending: about the share `density` of all. `size` is below 2^31. No place of a zero is
// chosen. tests/reference/sidco.py computes the same in NumPy.
std::vector<int32_t> ChooseBySidco(double density, const float* values, int64_t size,
                                   const ParallelFor& parallel_for);

}  // namespace gradcomp
