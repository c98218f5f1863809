// Gives top-k's work to a queue. What the kernels do: top_k.cu.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_ON_GPU_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_ON_GPU_H_

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeTopKOnGpu;
DecodeOnGpu DecodeTopKOnGpu;

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_ON_GPU_H_
