// The checks of the methods whose values are summed: ScaleCom, RandomK and PowerSGD.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "../kernels/chunks.h"
#include "../kernels/power_sgd.h"
#include "check_support.h"
#include "chunks_on_gpu.h"
#include "power_sgd_on_gpu.h"

namespace gradcomp {
namespace {

// Chunks for a thread, for a warp and for a block.
const std::vector<int64_t> kChunkedSizes = {9001, 70, 5003, 6000, 55, 300};
const std::vector<int64_t> kChunkSizes = {50, 25, 4500, 7, 25, 1};

Status CheckNotFinite(const ChunkLayout& layout, DriverQueue* queue) {
  const Tensors residuals = NumbersOf(kChunkedSizes, 21);
  Tensors gradients = NumbersOf(kChunkedSizes, 22);
  gradients[2][5000] = std::numeric_limits<float>::infinity();
  const auto sources = Sources(Upload(residuals, queue), Upload(gradients, queue));
  const SelectedOnGpu selected = SelectLargestOnGpu(layout, sources, /*chooses=*/false, queue);
  return Downloaded(selected.not_finite, queue)
             ? Status()
             : Status{"a gradient that is not finite is not found in its chunk"};
}

Status CheckStep(const ChunkLayout& layout, DriverQueue* queue) {
  Tensors residuals = NumbersOf(kChunkedSizes, 21);
  Tensors gradients = NumbersOf(kChunkedSizes, 22);
  Tensors outputs = NumbersOf(kChunkedSizes, 23);
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  const std::vector<float*> gpu_outputs = Upload(outputs, queue);
  const auto on_cpu = Sources(Pointers(&residuals), Pointers(&gradients));
  const auto on_gpu = Sources(gpu_residuals, Upload(gradients, queue));

  std::vector<int32_t> offsets(layout.num_words());
  std::vector<int32_t> gpu_offsets(layout.num_words());
  SelectLargest(layout, on_cpu, OnThisThread, offsets.data());
  const SelectedOnGpu selected = SelectLargestOnGpu(layout, on_gpu, /*chooses=*/true, queue);
  queue->Download(selected.offsets, 4 * gpu_offsets.size(), gpu_offsets.data());
  if (Downloaded(selected.not_finite, queue) || gpu_offsets != offsets) return {"the chosen entries of chunks differ from the CPU's"};

  std::vector<float> values(layout.num_chunks());
  std::vector<float> gpu_values(layout.num_chunks());
  const int64_t bytes = 4 * values.size();
  TakeChosen(layout, on_cpu, offsets.data(), OnThisThread, values.data());
  queue->Download(TakeChosenOnGpu(layout, on_gpu, offsets.data(), queue), bytes,
                  gpu_values.data());
  if (std::memcmp(gpu_values.data(), values.data(), bytes) != 0) {
    return {"the values taken from chunks differ from the CPU's"};
  }
  ApplyTotals(layout, on_cpu, offsets.data(), values.data(), values.data(), 0.3f, OnThisThread,
              Pointers(&outputs));
  ApplyTotalsOnGpu(layout, on_gpu, offsets.data(), values.data(), values.data(), 0.3f, queue,
                   gpu_outputs);
  if (!AreEqual(gpu_residuals, residuals, queue) || !AreEqual(gpu_outputs, outputs, queue)) {
    return {"what chunks are left with is not the CPU's"};
  }
  return {};
}

// Matrices of several blocks in both directions, and a matrix that is sent whole.
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

// The inputs of a step, and the results of the CPU.
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
  const Tensors without_flag = {{cpu->left.begin() + 1, cpu->left.end()}};
  if (Downloaded(left.not_finite, queue) || !AreEqual({left.left}, without_flag, queue)) {
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
  return Downloaded(ComputeLeftOnGpu(on_gpu, cpu.start, queue).not_finite, queue)
             ? Status()
             : Status{"a gradient that is not finite is not found in a matrix"};
}

}  // namespace

Status CheckChunks(DriverQueue* queue) {
  const ChunkLayout layout(kChunkedSizes, kChunkSizes);
  const Status status = CheckStep(layout, queue);
  return status.ok() ? CheckNotFinite(layout, queue) : status;
}

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
  cpu.method.Reduce({cpu.left.data(), cpu.right.data()}, {cpu.left.data(), total.data()},
                    Pointers(&cpu.reduced));
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
