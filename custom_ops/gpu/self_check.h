// Checks a device's kernels against the CPU's kernels before their first use.
#pragma once

#include "../kernels/common.h"

namespace gradcomp {

class DriverQueue;

// Runs each kernel on some thousand elements; the status names results that differ from the CPU's.
Status CheckAgainstCpu(DriverQueue* queue);

}  // namespace gradcomp
