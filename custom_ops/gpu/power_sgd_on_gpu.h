// Gives the work of PowerSGD to a queue. What the kernels do: power_sgd.cu.
#pragma once

#include <vector>

#include "../kernels/power_sgd.h"
#include "queue.h"

namespace gradcomp {

// In the memory of the device, once the queue has done its work.
struct LeftOnGpu {
  float* left;            // P, without the flag; null if there is none
  const int* not_finite;  // 0 if all of M is finite; null if there is none
};

// These do what the methods of PowerSgd do, with residuals, gradients and outputs whose pointers are the
// device's. P, Q and their sums are on the host, where replicas make the same of them on any device.
LeftOnGpu ComputeLeftOnGpu(const std::vector<PowerSgdTensor>& tensors,
                           const std::vector<float>& start, GpuQueue* queue);

// Returns Q, in the memory of the device; null if there is none.
float* ComputeRightOnGpu(const std::vector<PowerSgdTensor>& tensors, const float* left,
                         GpuQueue* queue);

void ReduceOnGpu(const std::vector<PowerSgdTensor>& tensors, const float* left, const float* right,
                 const float* total, const std::vector<float*>& reduced, GpuQueue* queue);

void KeepOnGpu(const std::vector<PowerSgdTensor>& tensors, const std::vector<char>& too_large,
               GpuQueue* queue);

}  // namespace gradcomp
