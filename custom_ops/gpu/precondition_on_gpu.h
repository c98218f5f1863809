// Submits Adam's division to a queue. The kernels are in precondition.cu.
#pragma once

#include <vector>

#include "../kernels/precondition.h"
#include "queue.h"
#include "tables.h"

namespace gradcomp {

gpu::Adam OnGpu(const AdamSettings& settings);

// Does the work of Precondition for tensors with device pointers.
void PreconditionOnGpu(const std::vector<PreconditionTensor>& tensors, GpuQueue* queue);

}  // namespace gradcomp
