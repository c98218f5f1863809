#include "op_on_host.h"
#include "power_sgd_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;

REGISTER_KERNEL_BUILDER(Name("PowerSgdLeft").Device(DEVICE_CPU), OpOnHost<PowerSgdLeftInputs>);
REGISTER_KERNEL_BUILDER(Name("PowerSgdRight").Device(DEVICE_CPU), OpOnHost<PowerSgdRightInputs>);
REGISTER_KERNEL_BUILDER(Name("PowerSgdReduce").Device(DEVICE_CPU), OpOnHost<PowerSgdReduceInputs>);

}  // namespace
}  // namespace gradcomp
