// Tests L-GreCo's plan under sanitizers. tests/planning compares it with the paper's.
#include "../kernels/knapsack.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

struct Choices {
  std::vector<double> sizes;
  std::vector<double> errors;
  int64_t uniform;
};

std::vector<int64_t> Plan(const std::vector<Choices>& all, int64_t steps) {
  std::vector<KnapsackLayer> layers;
  for (const Choices& one : all) {
    layers.push_back({one.sizes.data(), one.errors.data(), static_cast<int64_t>(one.sizes.size()),
                      one.uniform});
  }
  std::vector<int64_t> chosen(all.size(), -1);
  Knapsack(layers, steps, 1, chosen.data());
  return chosen;
}

double Total(const std::vector<Choices>& all, const std::vector<int64_t>& chosen,
             std::vector<double> Choices::*column) {
  double total = 0;
  for (size_t i = 0; i < all.size(); ++i) total += (all[i].*column)[chosen[i]];
  return total;
}

// Tests sizes around multiples of tiles, with few and many steps; some errors are NaN.
void PlansAreWithinTheBudgetAndNoLargerThanUniform() {
  std::mt19937 engine(1);
  std::uniform_real_distribution<double> error(0, 1);
  const std::vector<double> bad = {-1, 1e300, std::numeric_limits<double>::infinity(), std::nan("")};
  int64_t smaller = 0;
  for (int64_t steps : {1, 2, 1022, 1023, 1024, 1025, 5000}) {
    for (int64_t round = 0; round < 20; ++round) {
      std::vector<Choices> all(engine() % 20);
      for (Choices& one : all) {
        one.sizes.resize(1 + engine() % 9);
        for (double& size : one.sizes) size = 1 + engine() % 100;
        for (size_t i = 0; i < one.sizes.size(); ++i) {
          one.errors.push_back(i > 0 && engine() % 9 == 0 ? bad[engine() % 4] : error(engine));
        }
        one.uniform = 0;
      }
      const std::vector<int64_t> uniform(all.size(), 0);
      const std::vector<int64_t> chosen = Plan(all, steps);
      CHECK(Total(all, chosen, &Choices::errors) <=
            Total(all, uniform, &Choices::errors) * (1 + 1e-9));
      CHECK(Total(all, chosen, &Choices::sizes) <= Total(all, uniform, &Choices::sizes));
      smaller += chosen != uniform;
    }
  }
  CHECK(smaller > 70);
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(PlansAreWithinTheBudgetAndNoLargerThanUniform);
}
