// Submits top-k's work to a queue. The kernels are in top_k.cu.
#pragma once

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeTopKOnGpu;
DecodeOnGpu DecodeTopKOnGpu;

}  // namespace gradcomp
