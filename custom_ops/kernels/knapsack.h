// L-GreCo's plan, which makes a choice for each layer. The plan has the smallest total size of all
// plans with errors within a budget (Markov et al., MLSys 2024, Algorithm 1).
#pragma once

#include <cstdint>
#include <vector>

namespace gradcomp {

struct KnapsackLayer {
  const double* sizes;   // of each choice
  const double* errors;  // likewise
  int64_t num_choices;
  int64_t uniform;  // the choice whose error defines the budget
};

// Writes the choice of each layer. These are the uniform choices if their errors are zero or not
// finite, or if no smaller plan is within the budget. Among equally good choices, the first is
// taken. The budget is `budget` times the uniform errors; errors are rounded up to one of its
// `steps` steps.
void Knapsack(const std::vector<KnapsackLayer>& layers, int64_t steps, double budget,
              int64_t* chosen);

}  // namespace gradcomp
