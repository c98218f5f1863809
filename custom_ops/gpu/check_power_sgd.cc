#include <algorithm>
#include <limits>
#include <vector>

#include "../kernels/power_sgd.h"
#include "check_support.h"
#include "power_sgd_on_gpu.h"
#include "self_check.h"

namespace gradcomp {
namespace {

// Matrices of several blocks in both directions, and one that is sent whole.
struct MatrixShape {
  int64_t rows;
  int64_t columns;
  int64_t rank;
};
const std::vector<MatrixShape> kMatrices = {{300, 520, 5}, {70, 9, 2}, {1, 5000, 0}};
const std::vector<int64_t> kMatrixSizes = {300 * 520, 70 * 9, 5000};

std::vector<PowerSgdTensor> PowerSgdTensors(const std::vector<float*>& residuals,
                                            const std::vector<float*>& gradients) {
  std::vector<PowerSgdTensor> tensors;
  for (size_t i = 0; i < kMatrices.size(); ++i) {
    const auto& [rows, columns, rank] = kMatrices[i];
    tensors.push_back({residuals[i], gradients[i], GradientType::kFloat, rows, columns, rank, rank});
  }
  return tensors;
}

// What a step is made of on the CPU, and what is to come out of it.
struct CheckedPowerSgd {
  Tensors residuals = NumbersOf(kMatrixSizes, 31);
  Tensors gradients = NumbersOf(kMatrixSizes, 32);
  Tensors reduced = NumbersOf(kMatrixSizes, 33);
  std::vector<PowerSgdTensor> tensors =
      PowerSgdTensors(Pointers(&residuals), Pointers(&gradients));
  PowerSgd method{tensors, OnThisThread};
  std::vector<float> start;
  std::vector<float> left;
  std::vector<float> right;

  CheckedPowerSgd() : left(method.left_size()), right(method.right_size()) {
    Tensors zeros;
    std::vector<const float*> factors;
    for (const MatrixShape& shape : kMatrices) zeros.emplace_back(shape.columns * shape.rank);
    for (const std::vector<float>& factor : zeros) factors.push_back(factor.data());
    start = method.Start(factors, 1);
  }
};

Status CheckProducts(const std::vector<PowerSgdTensor>& on_gpu, CheckedPowerSgd* cpu,
                     DriverQueue* queue) {
  cpu->method.ComputeLeft(cpu->start, cpu->left.data());
  const LeftOnGpu left = ComputeLeftOnGpu(on_gpu, cpu->start, queue);
  int not_finite = 1;
  queue->Download(left.not_finite, sizeof not_finite, &not_finite);
  const Tensors without_flag = {{cpu->left.begin() + 1, cpu->left.end()}};
  if (not_finite || !AreEqual({left.left}, without_flag, queue)) {
    return {"left factors are not the CPU's"};
  }
  cpu->method.Orthonormalize(cpu->left.data());
  cpu->method.ComputeRight(cpu->left.data(), cpu->right.data());
  float* right = ComputeRightOnGpu(on_gpu, cpu->left.data(), queue);
  if (!AreEqual({right}, {cpu->right}, queue)) {
    return {"right factors are not the CPU's"};
  }
  return {};
}

Status CheckNotFiniteMatrix(std::vector<PowerSgdTensor> on_gpu, const CheckedPowerSgd& cpu,
                            DriverQueue* queue) {
  Tensors gradients = cpu.gradients;
  gradients[0].back() = std::numeric_limits<float>::infinity();
  const std::vector<float*> uploaded = Upload(gradients, queue);
  for (size_t i = 0; i < on_gpu.size(); ++i) on_gpu[i].gradient = uploaded[i];
  int not_finite = 0;
  queue->Download(ComputeLeftOnGpu(on_gpu, cpu.start, queue).not_finite, sizeof not_finite,
                  &not_finite);
  return not_finite ? Status() : Status{"a gradient that is not finite is not found in a matrix"};
}

}  // namespace

Status CheckPowerSgd(DriverQueue* queue) {
  CheckedPowerSgd cpu;
  const std::vector<float*> residuals = Upload(cpu.residuals, queue);
  const std::vector<float*> reduced = Upload(cpu.reduced, queue);
  const auto on_gpu = PowerSgdTensors(residuals, Upload(cpu.gradients, queue));
  Status status = CheckProducts(on_gpu, &cpu, queue);
  if (status.ok()) status = CheckNotFiniteMatrix(on_gpu, cpu, queue);
  if (!status.ok()) return status;
  std::vector<float> total = cpu.right;
  for (float& value : total) value *= 2;
  cpu.method.Reduce(cpu.left.data(), cpu.right.data(), total.data(), Pointers(&cpu.reduced));
  ReduceOnGpu(on_gpu, cpu.left.data(), cpu.right.data(), total.data(), reduced, queue);
  if (!AreEqual(residuals, cpu.residuals, queue) || !AreEqual(reduced, cpu.reduced, queue)) {
    return {"products of factors are not the CPU's"};
  }
  const std::vector<char> too_large = {0, 1, 0};
  cpu.method.Keep(too_large);
  KeepOnGpu(on_gpu, too_large, queue);
  return AreEqual(residuals, cpu.residuals, queue) ? Status()
                                                   : Status{"kept matrices are not the CPU's"};
}

}  // namespace gradcomp
