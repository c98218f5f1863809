// The check of a device's kernels against those of the CPU, before anything depends on them.
#pragma once

#include "../kernels/common.h"

namespace gradcomp {

class DriverQueue;

// Some thousand elements through each kernel; says where results differ from the CPU's.
Status CheckAgainstCpu(DriverQueue* queue);

}  // namespace gradcomp
