#include <memory>

#include "adacomp_inputs.h"
#include "adacomp_on_host.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

class AdaCompEncodeOp : public OpKernel {
 public:
  explicit AdaCompEncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    AdaCompEncodeInputs::Step step;
    OP_REQUIRES_OK(context, inputs_.Read(context, &step));
    OP_REQUIRES_OK(context, EncodeAdaCompOnHost(context, inputs_, &step));
  }

 private:
  AdaCompEncodeInputs inputs_;
};

class AdaCompDecodeOp : public OpKernel {
 public:
  explicit AdaCompDecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    std::unique_ptr<AdaCompDecoder> decoder;
    OP_REQUIRES_OK(context, inputs_.Read(context, &decoder));
    OP_REQUIRES_OK(context, DecodeAdaCompOnHost(context, inputs_, decoder.get()));
  }

 private:
  AdaCompDecodeInputs inputs_;
};

class AdaCompPutBackOp : public OpKernel {
 public:
  explicit AdaCompPutBackOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    LockedResiduals residuals;
    std::unique_ptr<AdaCompDecoder> decoder;
    OP_REQUIRES_OK(context, inputs_.Read(context, &residuals, &decoder));
    OP_REQUIRES_OK(context, PutBackAdaCompOnHost(context, &residuals, decoder.get()));
  }

 private:
  AdaCompPutBackInputs inputs_;
};

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode").Device(DEVICE_CPU), AdaCompEncodeOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode").Device(DEVICE_CPU), AdaCompDecodeOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack").Device(DEVICE_CPU), AdaCompPutBackOp);

}  // namespace
}  // namespace gradcomp
