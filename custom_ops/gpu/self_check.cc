#include "self_check.h"

#include "kernels_on_gpu.h"

namespace gradcomp {

Status CheckAgainstCpu(DriverQueue* queue) {
  for (const auto check :
       {CheckAdaComp, CheckPrecondition, CheckChunks, CheckPowerSgd, CheckTopK, CheckQsgd,
        CheckSignSgd}) {
    const Status status = check(queue);
    const Status device = queue->status();
    const Status& first = device.ok() ? status : device;
    if (!first.ok()) return {Concat("the check of the kernels fails: ", first.message)};
  }
  return {};
}

}  // namespace gradcomp
