// SIDCo's op, documented in tf_gradcomp/ops/sparsification.py.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../kernels/sidco.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

class SidcoChooseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(0);
    OP_REQUIRES(context, values.NumElements() <= std::numeric_limits<int32_t>::max(),
                InvalidArgument("values has ", values.NumElements(),
                                " elements; expected fewer than 2^31"));
    double density = 0;
    OP_REQUIRES_OK(context, GetScalar(context, 1, "density", &density));
    OP_REQUIRES_OK(context, ToTensorFlow(CheckDensity(density)));
    const std::vector<int32_t> chosen = ChooseBySidco(
        density, values.flat<float>().data(), values.NumElements(), ThreadPool(context));
    const int64_t count = chosen.size();
    Tensor* places;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count}), &places));
    std::copy(chosen.begin(), chosen.end(), places->flat<int32_t>().data());
  }
};

absl::Status ChooseShape(InferenceContext* c) {
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

REGISTER_OP("SidcoChoose")
    .Input("values: float")
    .Input("density: double")
    .Output("places: int32")
    .SetShapeFn(ChooseShape);

REGISTER_KERNEL_BUILDER(Name("SidcoChoose").Device(DEVICE_CPU), SidcoChooseOp);
// On a GPU, TensorFlow copies the values to the host.
REGISTER_KERNEL_BUILDER(Name("SidcoChoose")
                            .Device(DEVICE_GPU)
                            .HostMemory("values")
                            .HostMemory("density")
                            .HostMemory("places"),
                        SidcoChooseOp);

}  // namespace
}  // namespace gradcomp
