// Compares PowerSGD's GPU kernels, in the emulator, with its CPU kernels.
#include "gpu_emulator.h"

#include "../gpu/power_sgd.cu"

#include <limits>

#include "../gpu/power_sgd_on_gpu.h"
#include "check.h"
#include "emulated_queue.h"
#include "support.h"

namespace gradcomp {
namespace {

const EmulatedKernels kKernels = {GRADCOMP_POWER_SGD_KERNELS(EMULATED)};

struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t rank;
};

// Several blocks in both directions; partial blocks, lanes and groups of ranks; tensors that are
// empty or sent whole.
const std::vector<Shape> kShapes = {{0, 5, 0},     {300, 520, 5}, {1, 1, 1},   {17, 9, 1},
                                    {5, 0, 0},     {33, 40, 3},   {9000, 3, 2}, {2, 1100, 2},
                                    {1, 9000, 0},  {64, 512, 4},  {5000, 7, 7}, {1, 1, 0}};

std::vector<int64_t> SizesOf(const std::vector<Shape>& shapes) {
  std::vector<int64_t> sizes;
  for (const Shape& shape : shapes) sizes.push_back(shape.rows * shape.columns);
  return sizes;
}

struct LowRank : Replica {
  Tensors reduced;
  std::vector<PowerSgdTensor> tensors;

  LowRank(const std::vector<Shape>& shapes, GradientType type) : Replica(SizesOf(shapes)) {
    for (int64_t size : SizesOf(shapes)) reduced.emplace_back(size, 7.0f);
    const std::vector<Source> sources = Sources(type);
    for (size_t i = 0; i < shapes.size(); ++i) {
      tensors.push_back({sources[i].residual, sources[i].gradient, type, shapes[i].rows,
                         shapes[i].columns, shapes[i].rank, shapes[i].rank});
    }
  }
};

// Takes a step on the CPU, and then in the emulator with several orders of threads.
void CheckStep(GradientType type, const std::vector<unsigned>& seeds) {
  LowRank expected(kShapes, type);
  const PowerSgd method(expected.tensors, Threads(1));
  const std::vector<float> start = Normal(method.right_size(), 1, 3);
  const std::vector<float> total = Normal(method.right_size(), 1, 4);
  std::vector<float> left(method.left_size());
  std::vector<float> right(method.right_size());
  CHECK(method.ComputeLeft(start, left.data()));
  const std::vector<float> product(left.begin() + 1, left.end());
  CHECK(method.Orthonormalize(left.data()));
  method.ComputeRight(left.data(), right.data());
  method.Reduce({left.data(), right.data()}, {left.data(), total.data()},
                Pointers(&expected.reduced));
  for (unsigned seed : seeds) {
    LowRank replica(kShapes, type);
    EmulatedQueue queue(kKernels, seed);
    const LeftOnGpu found = ComputeLeftOnGpu(replica.tensors, start, &queue);
    CHECK(*found.not_finite == 0);
    CHECK(SameBits({found.left, found.left + product.size()}, product));
    const float* of_right = ComputeRightOnGpu(replica.tensors, left.data(), &queue);
    CHECK(SameBits({of_right, of_right + right.size()}, right));
    ReduceOnGpu(replica.tensors, left.data(), right.data(), total.data(),
                Pointers(&replica.reduced), &queue);
    CheckSame(replica.residuals, expected.residuals);
    CheckSame(replica.reduced, expected.reduced);
  }
}

void StepsAreThoseOfTheCpu() {
  CheckStep(GradientType::kFloat, {1, 20});
  CheckStep(GradientType::kHalf, {2});
  CheckStep(GradientType::kBFloat16, {3});
}

void WhatIsNotFiniteIsFoundInEveryTensor() {
  for (size_t i : {1, 2, 6, 7, 8, 11}) {
    for (float bad : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
      LowRank replica(kShapes, GradientType::kFloat);
      replica.gradients[i].back() = bad;
      const PowerSgd method(replica.tensors, Threads(1));
      EmulatedQueue queue(kKernels, 1);
      const std::vector<float> start = Normal(method.right_size(), 1, 3);
      CHECK(*ComputeLeftOnGpu(replica.tensors, start, &queue).not_finite == 1);
    }
  }
}

void WhatIsTooLargeIsNotKept() {
  LowRank expected(kShapes, GradientType::kBFloat16);
  LowRank replica(kShapes, GradientType::kBFloat16);
  std::vector<char> too_large(kShapes.size(), false);
  too_large[1] = too_large[8] = true;
  PowerSgd(expected.tensors, Threads(1)).Keep(too_large);
  EmulatedQueue queue(kKernels, 1);
  KeepOnGpu(replica.tensors, too_large, &queue);
  CheckSame(replica.residuals, expected.residuals);
}

void OfNoElementsThereIsNothingToDo() {
  LowRank replica({{0, 5, 0}, {5, 0, 0}}, GradientType::kFloat);
  const float flag = 0;
  EmulatedQueue queue(kKernels, 1);
  CHECK(ComputeLeftOnGpu(replica.tensors, {}, &queue).not_finite == nullptr);
  CHECK(ComputeRightOnGpu(replica.tensors, &flag, &queue) == nullptr);
  ReduceOnGpu(replica.tensors, &flag, nullptr, nullptr, Pointers(&replica.reduced), &queue);
  KeepOnGpu(replica.tensors, {false, false}, &queue);
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(StepsAreThoseOfTheCpu);
  RUN(WhatIsNotFiniteIsFoundInEveryTensor);
  RUN(WhatIsTooLargeIsNotKept);
  RUN(OfNoElementsThereIsNothingToDo);
}
