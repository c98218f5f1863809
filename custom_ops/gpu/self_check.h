// The check of a device's kernels against those of the CPU, before anything depends on them.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_SELF_CHECK_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_SELF_CHECK_H_

#include "../kernels/common.h"

namespace gradcomp {

class DriverQueue;

// Some thousand elements through each kernel; says where results differ from the CPU's.
Status CheckAgainstCpu(DriverQueue* queue);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_SELF_CHECK_H_
