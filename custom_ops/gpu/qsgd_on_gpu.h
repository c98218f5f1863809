// Gives QSGD's work to a queue. What the kernels do: qsgd.cu.
#pragma once

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeQsgdOnGpu;
DecodeOnGpu DecodeQsgdOnGpu;

}  // namespace gradcomp
