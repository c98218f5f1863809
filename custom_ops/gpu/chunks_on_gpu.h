// Gives the work of ScaleCom and RandomK to a queue. What the kernels do: chunks.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/chunks.h"
#include "queue.h"

namespace gradcomp {

// In the memory of the device, once the queue has done its work.
struct SelectedOnGpu {
  const int32_t* offsets;  // of layout.num_words(); undefined where nothing was to be chosen
  const int* not_finite;   // 0 if all sums are finite; null if there are none
};

// These do what the functions of kernels/chunks.h do, with tensors and outputs whose pointers are the
// device's. Offsets, totals and rests are on the host.
SelectedOnGpu SelectLargestOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                                 bool chooses, GpuQueue* queue);

// Returns the values, in the memory of the device; null if there are none.
const float* TakeChosenOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                             const int32_t* offsets, GpuQueue* queue);

void ApplyTotalsOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                      const int32_t* offsets, const float* totals, const float* rests,
                      float filter, GpuQueue* queue, const std::vector<float*>& outputs);

void KeepGradientsOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                        float filter, GpuQueue* queue);

}  // namespace gradcomp
