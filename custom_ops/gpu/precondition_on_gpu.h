// Gives Adam's division to a queue. What the kernels do: precondition.cu.
#pragma once

#include <vector>

#include "../kernels/precondition.h"
#include "queue.h"
#include "tables.h"

namespace gradcomp {

gpu::Adam OnGpu(const AdamSettings& settings);

// What Precondition does with tensors whose pointers are the device's.
void PreconditionOnGpu(const std::vector<PreconditionTensor>& tensors, GpuQueue* queue);

}  // namespace gradcomp
