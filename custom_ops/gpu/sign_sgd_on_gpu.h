// Submits SignSGD's work to a queue. The kernels are in sign_sgd.cu.
#pragma once

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeSignSgdOnGpu;
DecodeOnGpu DecodeSignSgdOnGpu;

}  // namespace gradcomp
