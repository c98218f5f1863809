#include "knapsack.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common.h"
#include "floats.h"
#include "simd.h"

namespace gradcomp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-9;  // the share of a step by which a whole number of steps may be exceeded
constexpr int64_t kTile = 1024;     // sizes that are computed together, in the cache

// Returns the steps of the budget that a choice uses; -1 if it uses more than the budget, or its
// error is NaN.
int64_t StepsOf(double error, double step, int64_t steps) {
  const double needed = std::ceil(error / step - kRounding);
  return needed >= 0 && needed <= steps ? static_cast<int64_t>(needed) : -1;
}

// Takes a choice wherever it makes the plan smaller. Choices are doubles, so that all lanes have
// one width.
constexpr Vectorized TakeWhereSmaller{[](const double* before, double size, double choice,
                                         int64_t count, double* smallest,
                                         double* chosen) GRADCOMP_INLINED {
  for (int64_t i = 0; i < count; ++i) {
    const double taken = before[i] + size;
    const bool better = taken < smallest[i];
    smallest[i] = better ? taken : smallest[i];
    chosen[i] = better ? choice : chosen[i];
  }
}};

// Extends the smallest sizes, by used steps, from the layers before to this layer.
void AddLayer(const KnapsackLayer& layer, const std::vector<int64_t>& needed,
              const std::vector<double>& before, std::vector<double>* smallest, int32_t* chosen) {
  const int64_t count = before.size();
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t end = std::min(begin + kTile, count);
    double choices[kTile] = {};
    std::fill(smallest->begin() + begin, smallest->begin() + end, kInfinity);
    for (int64_t choice = 0; choice < layer.num_choices; ++choice) {
      if (needed[choice] < 0) continue;
      const int64_t first = std::max(begin, needed[choice]);
      if (first >= end) continue;
      TakeWhereSmaller(before.data() + first - needed[choice], layer.sizes[choice], choice,
                       end - first, smallest->data() + first, choices + first - begin);
    }
    std::copy_n(choices, end - begin, chosen + begin);
  }
}

}  // namespace

void Knapsack(const std::vector<KnapsackLayer>& layers, int64_t steps, double budget,
              int64_t* chosen) {
  const IeeeArithmetic ieee;
  double most = 0;
  double uniform_size = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    chosen[i] = layers[i].uniform;
    most += layers[i].errors[chosen[i]];
    uniform_size += layers[i].sizes[chosen[i]];
  }
  most *= budget;
  if (!(most > 0 && most < kInfinity)) return;

  const int64_t count = steps + 1;
  std::vector<std::vector<int64_t>> needed(layers.size());
  std::vector<int32_t> best(layers.size() * count);  // by layer and steps used up to it
  std::vector<double> smallest(count, kInfinity);
  smallest[0] = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    for (int64_t choice = 0; choice < layers[i].num_choices; ++choice) {
      needed[i].push_back(StepsOf(layers[i].errors[choice], most / steps, steps));
    }
    const std::vector<double> before = smallest;
    AddLayer(layers[i], needed[i], before, &smallest, best.data() + i * count);
  }

  const auto found = std::min_element(smallest.begin(), smallest.end());
  const double limit = budget >= 1 ? uniform_size : kInfinity;  // the uniform choices are within this budget
  if (!(*found < limit)) return;
  int64_t used = found - smallest.begin();
  for (int64_t i = static_cast<int64_t>(layers.size()) - 1; i >= 0; --i) {
    chosen[i] = best[i * count + used];
    used -= needed[i][chosen[i]];
  }
}

}  // namespace gradcomp
