#include <memory>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/payload.h"
#include "adacomp_inputs.h"
#include "op_support.h"
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
    OP_REQUIRES_OK(context, step.variables.Unshare(context));
    AdaCompEncoder encoder(inputs_.Tensors(context, step), inputs_.scale_factor(),
                           ThreadPool(context), BestSimd(), step.adam);
    const bool finite = encoder.Run();
    const PayloadHeader header = inputs_.Header(step, finite, encoder.body_words());
    const absl::Status status = Write(context, header, &encoder);
    if (!status.ok()) encoder.Rollback();
    OP_REQUIRES_OK(context, status);
  }

 private:
  absl::Status Write(OpKernelContext* context, const PayloadHeader& header,
                     AdaCompEncoder* encoder) const {
    int32_t* words;
    TF_RETURN_IF_ERROR(inputs_.AllocatePayload(context, header, &words));
    if (!header.non_finite()) encoder->WriteBody(words + kHeaderWords);
    return inputs_.FinishPayload(context, header, words);
  }

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
    std::vector<float*> reduced;
    bool* finite;
    OP_REQUIRES_OK(context, inputs_.AllocateOutputs(context, &reduced, &finite));
    *finite = decoder->Reduce(reduced);
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
    if (!decoder->finite()) return;
    OP_REQUIRES_OK(context, residuals.Unshare(context));
    decoder->AddTo(residuals.all_data());
  }

 private:
  AdaCompPutBackInputs inputs_;
};

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode").Device(DEVICE_CPU), AdaCompEncodeOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode").Device(DEVICE_CPU), AdaCompDecodeOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack").Device(DEVICE_CPU), AdaCompPutBackOp);

}  // namespace
}  // namespace gradcomp
