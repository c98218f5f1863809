// L-GreCo's plan: one choice of each layer, so that all together are smallest and their errors
// within a budget (Markov et al., MLSys 2024, Algorithm 1).
#pragma once

#include <cstdint>
#include <vector>

namespace gradcomp {

struct KnapsackLayer {
  const double* sizes;   // of each choice
  const double* errors;  // likewise
  int64_t num_choices;
  int64_t uniform;  // the choice whose error counts for the budget
};

// Writes the choice of each layer: the uniform ones if their errors are zero or not finite, or if
// nothing smaller is within the budget. Of choices that are equally good, the first one counts.
// Errors are rounded up to one of `steps` steps of the budget, `budget` times the uniform errors.
void Knapsack(const std::vector<KnapsackLayer>& layers, int64_t steps, double budget,
              int64_t* chosen);

}  // namespace gradcomp
