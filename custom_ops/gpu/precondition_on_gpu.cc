#include "precondition_on_gpu.h"

#include <algorithm>
#include <cmath>

#include "precondition_tables.h"

namespace gradcomp {

gpu::Adam OnGpu(const AdamSettings& settings) {
  return {1 - settings.beta_2, std::max(settings.beta_2, 0.5f), settings.epsilon,
          std::sqrt(settings.scale)};
}

void PreconditionOnGpu(const std::vector<PreconditionTensor>& tensors, GpuQueue* queue) {
  std::vector<gpu::DividedTensor> divided;
  int64_t num_slices = 0;
  for (const PreconditionTensor& tensor : tensors) {
    divided.push_back({tensor.second_moment, tensor.gradient, tensor.squares,
                       tensor.preconditioned, static_cast<int>(tensor.type), tensor.size,
                       num_slices, OnGpu(tensor.adam)});
    num_slices += CeilDiv(tensor.size, gpu::kSliceElements);
  }
  if (num_slices == 0) return;
  gpu::PreconditionStep step = {};
  step.tensors = CopyToGpu(queue, divided);
  step.num_tensors = divided.size();
  step.not_finite = NewOnGpu<int>(queue, 1);
  queue->Zero(step.not_finite, sizeof(int));
  queue->Launch("gradcomp_precondition_check", num_slices, &step);
  queue->Launch("gradcomp_precondition_divide", num_slices, &step);
}

}  // namespace gradcomp
