// The check of a device's kernels against those of the CPU, before anything depends on them.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_SELF_CHECK_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_SELF_CHECK_H_

#include "../kernels/common.h"

namespace gradcomp {

class DriverQueue;

// Some thousand elements through each kernel; says where results differ from the CPU's.
Status CheckAgainstCpu(DriverQueue* queue);

// Its parts, by method.
Status CheckAdaComp(DriverQueue* queue);
Status CheckPrecondition(DriverQueue* queue);
Status CheckChunks(DriverQueue* queue);
Status CheckPowerSgd(DriverQueue* queue);
Status CheckTopK(DriverQueue* queue);
Status CheckQsgd(DriverQueue* queue);
Status CheckSignSgd(DriverQueue* queue);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_SELF_CHECK_H_
