// Submits the work of PowerSGD to a queue. The kernels are in power_sgd.cu.
#pragma once

#include <vector>

#include "../kernels/power_sgd.h"
#include "queue.h"

namespace gradcomp {

// Pointers to device memory, valid once the queue has done its work.
struct LeftOnGpu {
  float* left;            // P without the flag; null if empty
  const int* not_finite;  // 0 if all of M is finite; null if there is none
};

// These functions do the work of PowerSgd's methods for residuals, gradients and outputs with
// device pointers. P, Q and their sums are on the host, where all replicas process them alike, on
// any device.
LeftOnGpu ComputeLeftOnGpu(const std::vector<PowerSgdTensor>& tensors,
                           const std::vector<float>& start, GpuQueue* queue);

// Returns Q in device memory; null if empty.
float* ComputeRightOnGpu(const std::vector<PowerSgdTensor>& tensors, const float* left,
                         GpuQueue* queue);

void ReduceOnGpu(const std::vector<PowerSgdTensor>& tensors, const float* left, const float* right,
                 const float* total, const std::vector<float*>& reduced, GpuQueue* queue);

void KeepOnGpu(const std::vector<PowerSgdTensor>& tensors, const std::vector<char>& too_large,
               GpuQueue* queue);

}  // namespace gradcomp
