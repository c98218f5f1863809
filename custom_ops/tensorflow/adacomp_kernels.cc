#include "adacomp_inputs.h"
#include "op_on_host.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode").Device(DEVICE_CPU), OpOnHost<AdaCompEncodeInputs>);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode").Device(DEVICE_CPU), OpOnHost<AdaCompDecodeInputs>);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack").Device(DEVICE_CPU), OpOnHost<AdaCompPutBackInputs>);

}  // namespace
}  // namespace gradcomp
