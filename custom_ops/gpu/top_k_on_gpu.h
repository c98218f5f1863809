// Gives top-k's work to a queue. What the kernels do: top_k.cu.
#pragma once

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeTopKOnGpu;
DecodeOnGpu DecodeTopKOnGpu;

}  // namespace gradcomp
