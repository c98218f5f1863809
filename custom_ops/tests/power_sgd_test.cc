// Compares PowerSGD's kernels, under sanitizers, with plain loops in double.
#include "../kernels/power_sgd.h"
#include "../kernels/power_sgd_alternating.h"

#include <cmath>
#include <limits>
#include <memory>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t rank;
  int64_t more = 0;  // unused columns of the factor
};

// Partial lanes, tiles and blocks; all groups of columns; tensors that are empty or sent whole.
const std::vector<Shape> kShapes = {{1, 1, 0},    {1, 1, 1},      {17, 9, 1},    {64, 65, 2},
                                    {33, 40, 3},  {40, 33, 7},    {0, 5, 0},     {5, 0, 0},
                                    {300, 511, 4}, {300, 513, 4}, {9000, 16, 5}, {3, 70000, 3},
                                    {1, 5000, 1}, {140001, 1, 1}, {1, 140001, 0}};

template <typename Gradient>
std::vector<Gradient> Values(int64_t size, uint32_t seed);
template <>
std::vector<float> Values(int64_t size, uint32_t seed) {
  return Normal(size, 1, seed);
}
template <>
std::vector<Half> Values(int64_t size, uint32_t seed) {
  return Halves(size, seed, 0x4400);  // to 4
}
template <>
std::vector<BFloat16> Values(int64_t size, uint32_t seed) {
  return BrainFloats(size, 1, seed);
}

// A step of a replica, in vectors whose memory ends with their values.
template <typename Gradient>
struct Step {
  Step(const std::vector<Shape>& shapes, GradientType type, int64_t threads) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const int64_t size = shapes[i].rows * shapes[i].columns;
      residuals.push_back(Normal(size, 0.3f, 100 + i));
      gradients.push_back(Values<Gradient>(size, i));
      factors.emplace_back(shapes[i].columns * (shapes[i].rank + shapes[i].more));
      reduced.emplace_back(size);
    }
    sums = residuals;
    std::vector<PowerSgdTensor> tensors;
    for (size_t i = 0; i < shapes.size(); ++i) {
      for (size_t j = 0; j < sums[i].size(); ++j) sums[i][j] += ToFloat(gradients[i][j]);
      tensors.push_back({residuals[i].data(), gradients[i].data(), type, shapes[i].rows,
                         shapes[i].columns, shapes[i].rank, shapes[i].rank + shapes[i].more});
    }
    method = std::make_unique<PowerSgd>(tensors, Threads(threads));
    left.resize(method->left_size());
    right.resize(method->right_size());
  }

  std::vector<float> Start() const {
    std::vector<const float*> pointers;
    for (const auto& factor : factors) pointers.push_back(factor.data());
    return method->Start(pointers, kStep);
  }

  void Run() {
    CHECK(method->ComputeLeft(Start(), left.data()));
    CHECK(method->Orthonormalize(left.data()));
    method->ComputeRight(left.data(), right.data());
    CHECK(method->CanMultiply(right.data()));
    const PowerSgd::Factors sent = {left.data(), right.data()};
    method->Reduce(sent, sent, Pointers(&reduced));
    method->StoreFactors(right.data(), Pointers(&factors));
  }

  Tensors residuals;
  std::vector<std::vector<Gradient>> gradients;
  Tensors factors;
  Tensors sums;
  Tensors reduced;
  std::vector<float> left;
  std::vector<float> right;
  std::unique_ptr<PowerSgd> method;
};

bool Near(double a, double b, double error) { return std::fabs(a - b) <= error; }

double Product(const std::vector<float>& a, int64_t a_first, int64_t a_stride,
               const std::vector<float>& b, int64_t b_first, int64_t b_stride, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    sum += static_cast<double>(a[a_first + i * a_stride]) * b[b_first + i * b_stride];
  }
  return sum;
}

// The tensor's factors begin at `left` and `right`.
template <typename Gradient>
void CheckTensor(const Step<Gradient>& step, size_t index, const Shape& shape, int64_t left,
                 int64_t right) {
  const std::vector<float>& sum = step.sums[index];
  if (shape.rank == 0) {
    for (size_t j = 0; j < sum.size(); ++j) {
      CHECK(step.left[left + j] == sum[j]);
      CHECK(step.reduced[index][j] == sum[j]);
      CHECK(step.residuals[index][j] == 0);
    }
    return;
  }
  for (int64_t k = 0; k < shape.rank; ++k) {
    const int64_t column = left + k * shape.rows;
    for (int64_t j = 0; j <= k; ++j) {
      const double dot =
          Product(step.left, left + j * shape.rows, 1, step.left, column, 1, shape.rows);
      CHECK(Near(dot, j == k, 1e-5));
    }
    for (int64_t j = 0; j < shape.columns; ++j) {
      const double expected = Product(sum, j, shape.columns, step.left, column, 1, shape.rows);
      CHECK(Near(step.right[right + k * shape.columns + j], expected, 1e-3));
    }
  }
  for (int64_t i = 0; i < shape.rows; ++i) {
    for (int64_t j = 0; j < shape.columns; ++j) {
      const int64_t at = i * shape.columns + j;
      const double expected = Product(step.left, left + i, shape.rows, step.right, right + j,
                                      shape.columns, shape.rank);
      CHECK(Near(step.reduced[index][at], expected, 1e-4));
      CHECK(Near(step.residuals[index][at] + step.reduced[index][at], sum[at], 1e-5));
    }
  }
}

template <typename Gradient>
void CheckStep(GradientType type) {
  Step<Gradient> step(kShapes, type, 2);
  step.Run();
  int64_t left = 1;
  int64_t right = 0;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const Shape& shape = kShapes[i];
    CheckTensor(step, i, shape, left, right);
    left += shape.rank == 0 ? shape.rows * shape.columns : shape.rank * shape.rows;
    right += shape.rank * shape.columns;
  }
  CHECK(left == step.method->left_size());
  CHECK(right == step.method->right_size());
}

void ProductsAreThoseOfPlainLoops() {
  CheckStep<float>(GradientType::kFloat);
  CheckStep<Half>(GradientType::kHalf);
  CheckStep<BFloat16>(GradientType::kBFloat16);
}

void LeftFactorsArePlainProductsWithTheFactorsOfTheStepBefore() {
  Step<float> step({{300, 700, 3}}, GradientType::kFloat, 1);
  step.factors[0] = Normal(2100, 1, 5);
  CHECK(step.method->ComputeLeft(step.Start(), step.left.data()));
  for (int64_t k = 0; k < 3; ++k) {
    for (int64_t i = 0; i < 300; ++i) {
      const double expected = Product(step.sums[0], i * 700, 1, step.factors[0], k, 3, 700);
      CHECK(Near(step.left[1 + k * 300 + i], expected, 1e-3));
    }
  }
}

// Sets a column of a factor to values that do not depend on the number of columns.
void FillColumn(const Shape& shape, int64_t column, std::vector<float>* factor) {
  const std::vector<float> values = Normal(shape.columns, 1, 50 + column);
  for (int64_t i = 0; i < shape.columns; ++i) {
    (*factor)[i * (shape.rank + shape.more) + column] = values[i];
  }
}

void ColumnsBehindTheRankDoNotCountAndBecomeZeros() {
  const Shape narrow = {300, 70, 3};
  const Shape wide = {300, 70, 3, 2};
  const Shape whole = {30, 7, 0, 2};
  Step<float> expected({narrow, {30, 7, 0}}, GradientType::kFloat, 1);
  Step<float> step({wide, whole}, GradientType::kFloat, 1);
  for (int64_t k : {0, 2}) FillColumn(narrow, k, &expected.factors[0]);  // 1 is of zeros
  for (int64_t k : {0, 2, 3, 4}) FillColumn(wide, k, &step.factors[0]);
  for (int64_t k : {0, 1}) FillColumn(whole, k, &step.factors[1]);
  expected.Run();
  step.Run();
  CHECK(step.left == expected.left);
  CHECK(step.right == expected.right);
  CHECK(step.residuals == expected.residuals);
  CHECK(step.reduced == expected.reduced);
  for (int64_t i = 0; i < 70; ++i) {
    for (int64_t k = 0; k < 5; ++k) {
      CHECK(step.factors[0][i * 5 + k] == (k < 3 ? expected.factors[0][i * 3 + k] : 0));
    }
  }
  for (float value : step.factors[1]) CHECK(value == 0);
}

void ThreadsDoNotChangeResults() {
  Step<float> expected(kShapes, GradientType::kFloat, 1);
  expected.Run();
  for (int64_t threads : {2, 3, 16}) {
    Step<float> step(kShapes, GradientType::kFloat, threads);
    step.Run();
    CHECK(step.left == expected.left);
    CHECK(step.right == expected.right);
    CHECK(step.residuals == expected.residuals);
    CHECK(step.reduced == expected.reduced);
    CHECK(step.factors == expected.factors);
  }
}

void ReducedMayBeWhereTheGradientIs() {
  Step<float> expected(kShapes, GradientType::kFloat, 1);
  expected.Run();
  Step<float> step(kShapes, GradientType::kFloat, 2);
  step.method->ComputeLeft(step.Start(), step.left.data());
  step.method->Orthonormalize(step.left.data());
  step.method->ComputeRight(step.left.data(), step.right.data());
  const PowerSgd::Factors sent = {step.left.data(), step.right.data()};
  step.method->Reduce(sent, sent, Pointers(&step.gradients));
  CHECK(step.gradients == expected.reduced);
  CHECK(step.residuals == expected.residuals);
}

void WhatIsNotFiniteIsSeenWhereverItIs() {
  for (size_t tensor : {size_t{0}, size_t{1}}) {
    for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      for (bool in_gradient : {false, true}) {
        Step<float> step({{300, 513, 4}, {1, 140001, 0}}, GradientType::kFloat, 2);
        for (size_t element : {size_t{0}, size_t{140000}}) {
          float* place = &(in_gradient ? step.gradients : step.residuals)[tensor][element];
          const float good = *place;
          *place = bad;
          CHECK(!step.method->ComputeLeft(step.Start(), step.left.data()));
          CHECK(std::isnan(step.left[0]));
          CHECK(!step.method->Orthonormalize(step.left.data()));
          *place = good;
        }
        CHECK(step.method->ComputeLeft(step.Start(), step.left.data()));
      }
    }
  }
}

void KeepingAddsTheGradients() {
  Step<float> step(kShapes, GradientType::kFloat, 2);
  step.method->Keep(step.method->TooLarge(step.left.data(), step.right.data()));
  CHECK(step.residuals == step.sums);
}

void WhatIsTooLargeOnlyAsASumIsNotKept() {
  const std::vector<Shape> shapes = {{300, 513, 4}, {1, 140001, 0}, {9, 8, 2}, {3, 3, 0}};
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (bool finite : {true, false}) {
    Step<float> step(shapes, GradientType::kFloat, 2);
    step.left[0] = finite ? 0 : std::nanf("");
    step.left[1] = kInfinity;  // of the first tensor
    step.left[1 + 4 * 300 + 140000] = kInfinity;  // the last of the second
    step.right[4 * 513 + 2 * 8 - 1] = 2e38f;  // of the third
    step.method->Keep(step.method->TooLarge(step.left.data(), step.right.data()));
    for (size_t i = 0; i < shapes.size(); ++i) {
      const std::vector<float> zeros(step.sums[i].size());
      CHECK(step.residuals[i] == (finite && i < 3 ? zeros : step.sums[i]));
    }
  }
}

void ProductsThatMayOverflowAreSeen() {
  Step<float> step({{9, 8, 2}, {3, 3, 0}, {5, 7, 1}}, GradientType::kFloat, 1);
  CHECK(step.method->CanMultiply(step.right.data()));
  for (float& value : step.right) {
    value = 2e38f;
    CHECK(!step.method->CanMultiply(step.right.data()));
    value = std::nanf("");
    CHECK(!step.method->CanMultiply(step.right.data()));
    value = -1e38f;
    CHECK(step.method->CanMultiply(step.right.data()));
    value = 0;
  }
  step.right[3] = step.right[8 + 3] = 1e38f;
  CHECK(!step.method->CanMultiply(step.right.data()));
  step.method->FlagProducts(step.right.data());
  CHECK(std::isnan(step.right[0]));
  CHECK(step.right[16] == 0);  // of the next tensor
}

// A step of a replica by ACP-SGD, with the residuals of the step before.
struct AlternatingStep : Step<float> {
  explicit AlternatingStep(int64_t threads) : Step(kShapes, GradientType::kFloat, threads) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const Shape& shape = kShapes[i];
      factors[i].resize((shape.rows + shape.columns) * shape.rank);
      tensors.push_back({residuals[i].data(), gradients[i].data(), GradientType::kFloat, shape.rows,
                         shape.columns, shape.rank, shape.rank});
    }
  }

  void Run(int64_t threads) {
    const AlternatingPowerSgd method(tensors, Pointers(&factors), kStep, Threads(threads));
    sent.assign(method.size(), 0);
    CHECK(method.Project(sent.data()));
    CHECK(method.CanReduce(sent.data()));
    method.Reduce(sent.data(), sent.data(), Pointers(&reduced));
  }

  std::vector<PowerSgdTensor> tensors;
  std::vector<float> sent;
};

void AlternatingKeepsWhatItDoesNotSend() {
  AlternatingStep step(2);
  for (int number = 0; number < 3; ++number) {
    const Tensors before = step.residuals;
    step.Run(2);
    for (size_t i = 0; i < kShapes.size(); ++i) {
      for (size_t j = 0; j < before[i].size(); ++j) {
        const double had = before[i][j] + step.gradients[i][j];
        CHECK(Near(step.residuals[i][j] + step.reduced[i][j], had, 1e-4));
      }
      const int64_t lefts = kShapes[i].rows * kShapes[i].rank;
      for (size_t j = 0; j < step.factors[i].size(); ++j) {
        const bool is_left = static_cast<int64_t>(j) < lefts;
        CHECK(is_left == (number % 2 == 0) || step.factors[i][j] == 0);
      }
    }
  }
}

void ThreadsDoNotChangeAlternatingSteps() {
  AlternatingStep expected(1);
  AlternatingStep step(3);
  for (int number = 0; number < 2; ++number) {
    expected.Run(1);
    step.Run(3);
    CHECK(step.sent == expected.sent);
    CHECK(step.residuals == expected.residuals);
    CHECK(step.reduced == expected.reduced);
    CHECK(step.factors == expected.factors);
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(ProductsAreThoseOfPlainLoops);
  RUN(LeftFactorsArePlainProductsWithTheFactorsOfTheStepBefore);
  RUN(ColumnsBehindTheRankDoNotCountAndBecomeZeros);
  RUN(ThreadsDoNotChangeResults);
  RUN(ReducedMayBeWhereTheGradientIs);
  RUN(WhatIsNotFiniteIsSeenWhereverItIs);
  RUN(KeepingAddsTheGradients);
  RUN(WhatIsTooLargeOnlyAsASumIsNotKept);
  RUN(ProductsThatMayOverflowAreSeen);
  RUN(AlternatingKeepsWhatItDoesNotSend);
  RUN(ThreadsDoNotChangeAlternatingSteps);
}
