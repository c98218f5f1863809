// Gives QSGD's work to a queue. What the kernels do: qsgd.cu.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_ON_GPU_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_ON_GPU_H_

#include "fixed_on_gpu.h"

namespace gradcomp {

EncodeOnGpu EncodeQsgdOnGpu;
DecodeOnGpu DecodeQsgdOnGpu;

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_ON_GPU_H_
