// Submits QSGD's work to a queue. The kernels are in qsgd.cu.
#pragma once

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeQsgdOnGpu;
DecodeOnGpu DecodeQsgdOnGpu;

}  // namespace gradcomp
