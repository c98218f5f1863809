// AdaComp's ops on the host, whatever device they run on.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_ON_HOST_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_ON_HOST_H_

#include "adacomp_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// Writes the outputs. Where they can't be had, variables are what they were.
absl::Status EncodeAdaCompOnHost(tensorflow::OpKernelContext* context,
                                 const AdaCompEncodeInputs& inputs,
                                 AdaCompEncodeInputs::Step* step);

absl::Status DecodeAdaCompOnHost(tensorflow::OpKernelContext* context,
                                 const AdaCompDecodeInputs& inputs, AdaCompDecoder* decoder);

absl::Status PutBackAdaCompOnHost(tensorflow::OpKernelContext* context, LockedResiduals* residuals,
                                  AdaCompDecoder* decoder);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_ON_HOST_H_
