#include "power_sgd_on_gpu.h"

#include "power_sgd_tables.h"

namespace gradcomp {
namespace {

// The numbers of blocks to launch, and the sizes of their outputs.
struct MatrixPlan {
  std::vector<gpu::Matrix> matrices;
  int64_t num_pieces = 0;
  int64_t num_blocks = 0;
  int64_t num_slices = 0;
  int64_t left_size = 0;
  int64_t right_size = 0;
  int64_t parts_size = 0;
};

void PlanBlocks(const PowerSgdTensor& tensor, MatrixPlan* plan, gpu::Matrix* matrix) {
  matrix->block_rows = tensor.block_rows();
  matrix->block_columns = tensor.block_columns();
  matrix->row_blocks = CeilDiv(tensor.rows, tensor.block_rows());
  matrix->column_blocks = CeilDiv(tensor.columns, tensor.block_columns());
  const int64_t num_blocks = matrix->row_blocks * matrix->column_blocks;
  plan->num_blocks += num_blocks;
  plan->parts_size += num_blocks * tensor.rank * tensor.block_columns();
}

MatrixPlan PlanMatrices(const std::vector<PowerSgdTensor>& tensors) {
  MatrixPlan plan;
  for (const PowerSgdTensor& tensor : tensors) {
    gpu::Matrix matrix = {};
    matrix.residual = tensor.residual;
    matrix.gradient = tensor.gradient;
    matrix.gradient_type = static_cast<int>(tensor.type);
    matrix.rows = tensor.rows;
    matrix.columns = tensor.columns;
    matrix.rank = tensor.rank;
    matrix.size = tensor.size();
    matrix.left_begin = plan.left_size;
    matrix.right_begin = plan.right_size;
    matrix.first_piece = plan.num_pieces;
    matrix.first_block = plan.num_blocks;
    matrix.parts_begin = plan.parts_size;
    matrix.first_slice = plan.num_slices;
    const int64_t num_slices = CeilDiv(tensor.size(), gpu::kSliceElements);
    if (tensor.rank > 0) PlanBlocks(tensor, &plan, &matrix);
    plan.num_pieces += tensor.rank > 0 ? CeilDiv(tensor.rows, gpu::kPieceRows) : num_slices;
    plan.num_slices += num_slices;
    plan.left_size += tensor.left_size();
    plan.right_size += tensor.right_size();
    plan.matrices.push_back(matrix);
  }
  return plan;
}

gpu::PowerSgdStep BeginStep(const MatrixPlan& plan, GpuQueue* queue) {
  gpu::PowerSgdStep step = {};
  step.matrices = CopyToGpu(queue, plan.matrices);
  step.num_matrices = plan.matrices.size();
  step.right_size = plan.right_size;
  return step;
}

float* UploadFloats(const float* values, int64_t size, GpuQueue* queue) {
  return static_cast<float*>(queue->Upload(values, 4 * size));
}

}  // namespace

LeftOnGpu ComputeLeftOnGpu(const std::vector<PowerSgdTensor>& tensors,
                           const std::vector<float>& start, GpuQueue* queue) {
  const MatrixPlan plan = PlanMatrices(tensors);
  if (plan.num_pieces == 0) return {nullptr, nullptr};
  gpu::PowerSgdStep step = BeginStep(plan, queue);
  step.start = CopyToGpu(queue, start);
  step.left = NewOnGpu<float>(queue, plan.left_size);
  step.not_finite = NewOnGpu<int>(queue, 1);
  queue->Zero(step.not_finite, sizeof(int));
  queue->Launch("gradcomp_power_sgd_left", plan.num_pieces, &step);
  return {step.left, step.not_finite};
}

float* ComputeRightOnGpu(const std::vector<PowerSgdTensor>& tensors, const float* left,
                         GpuQueue* queue) {
  const MatrixPlan plan = PlanMatrices(tensors);
  if (plan.num_blocks == 0) return nullptr;
  gpu::PowerSgdStep step = BeginStep(plan, queue);
  step.left = UploadFloats(left + 1, plan.left_size, queue);
  step.right = NewOnGpu<float>(queue, plan.right_size);
  step.parts = NewOnGpu<float>(queue, plan.parts_size);
  queue->Launch("gradcomp_power_sgd_right", plan.num_blocks, &step);
  queue->Launch("gradcomp_power_sgd_join", CeilDiv(plan.right_size, gpu::kThreads), &step);
  return step.right;
}

void ReduceOnGpu(const std::vector<PowerSgdTensor>& tensors, const float* left, const float* right,
                 const float* total, const std::vector<float*>& reduced, GpuQueue* queue) {
  MatrixPlan plan = PlanMatrices(tensors);
  if (plan.num_slices == 0) return;
  for (size_t i = 0; i < reduced.size(); ++i) plan.matrices[i].output = reduced[i];
  gpu::PowerSgdStep step = BeginStep(plan, queue);
  step.left = UploadFloats(left + 1, plan.left_size, queue);
  step.right = UploadFloats(right, plan.right_size, queue);
  step.total = UploadFloats(total, plan.right_size, queue);
  queue->Launch("gradcomp_power_sgd_reduce", plan.num_slices, &step);
}

void KeepOnGpu(const std::vector<PowerSgdTensor>& tensors, const std::vector<char>& too_large,
               GpuQueue* queue) {
  MatrixPlan plan = PlanMatrices(tensors);
  if (plan.num_slices == 0) return;
  for (size_t i = 0; i < too_large.size(); ++i) plan.matrices[i].too_large = too_large[i];
  gpu::PowerSgdStep step = BeginStep(plan, queue);
  queue->Launch("gradcomp_power_sgd_keep", plan.num_slices, &step);
}

}  // namespace gradcomp
