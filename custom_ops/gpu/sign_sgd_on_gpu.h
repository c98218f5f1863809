// Gives SignSGD's work to a queue. What the kernels do: sign_sgd.cu.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_ON_GPU_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_ON_GPU_H_

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeSignSgdOnGpu;
DecodeOnGpu DecodeSignSgdOnGpu;

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_ON_GPU_H_
