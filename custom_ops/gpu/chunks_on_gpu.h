// Submits the work of ScaleCom and RandomK to a queue. The kernels are in chunks.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/chunks.h"
#include "queue.h"

namespace gradcomp {

// Pointers to device memory, valid once the queue has done its work.
struct SelectedOnGpu {
  const int32_t* offsets;  // layout.num_words() words; undefined if nothing was to be chosen
  const int* not_finite;   // 0 if all sums are finite; null if there are none
};

// These functions do the work of kernels/chunks.h for tensors and outputs with device pointers.
// Offsets, totals and rests are on the host.
SelectedOnGpu SelectLargestOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                                 bool chooses, GpuQueue* queue);

// Returns the values in device memory; null if there are none.
const float* TakeChosenOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                             const int32_t* offsets, GpuQueue* queue);

void ApplyTotalsOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                      const int32_t* offsets, const float* totals, const float* rests,
                      float filter, GpuQueue* queue, const std::vector<float*>& outputs);

void KeepGradientsOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                        float filter, GpuQueue* queue);

}  // namespace gradcomp
