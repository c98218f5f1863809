// AdaComp's ops on GPUs. What crosses to the host and back is payloads and what the ops need to know
// beforehand; no stream is waited for. Where the kernels can't be used, an op copies its
// tensors to the host, does there what it does on a CPU, and copies them back.
#include <memory>
#include <vector>

#include "../gpu/adacomp_on_gpu.h"
#include "adacomp_inputs.h"
#include "adacomp_on_host.h"
#include "gpu_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

class AdaCompEncodeGpuOp : public AsyncOpKernel {
 public:
  explicit AdaCompEncodeGpuOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto step = std::make_shared<AdaCompEncodeInputs::Step>();
    OP_REQUIRES_OK_ASYNC(context, inputs_.Read(context, step.get()), done);
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK_ASYNC(context, EncodeAdaCompOnHost(context, inputs_, step.get()), done);
      step->variables.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK_ASYNC(context, queue->Unshare(&step->variables), done);
    auto* summary =
        static_cast<gpu::EncodeSummary*>(queue->AllocateOnHost(sizeof(gpu::EncodeSummary)));
    const EncodedOnGpu encoded =
        EncodeAdaComp(inputs_.Tensors(context, *step), inputs_.scale_factor(), queue.get());
    queue->CopyToHost(encoded.summary, sizeof *summary, summary);
    // What comes behind on the stream sees the variables as they are then.
    step->variables.Unlock();
    auto* waiting = queue.get();
    const bool goes_on = waiting->Then([this, context, done, waiting, step, encoded, summary] {
      Send(context, done, waiting, *step, encoded, *summary);
    });
    if (goes_on) return;
    context->SetStatus(queue->KeepUntilDone());
    done();
  }

 private:
  // The length is known: copies the payload.
  void Send(OpKernelContext* context, const DoneCallback& done, TensorFlowQueue* queue,
            const AdaCompEncodeInputs::Step& step, const EncodedOnGpu& encoded,
            const gpu::EncodeSummary& summary) const {
    const PayloadHeader header = inputs_.Header(step, summary.finite, summary.body_words);
    AdaCompEncodeInputs::Outputs outputs;
    const absl::Status allocated = inputs_.Allocate(context, header, &outputs);
    const CurrentContext current(queue->driver(), queue->context());
    if (!allocated.ok()) {
      // Nothing has seen the variables since: what uses them waits for this op.
      TakeBackAdaComp(encoded, queue);
      queue->KeepUntilDone().IgnoreError();  // the first error counts
      context->SetStatus(allocated);
      return done();
    }
    queue->CopyToHost(encoded.body, 4 * summary.body_words, outputs.payload + kHeaderWords);
    queue->Finish(done, [this, header, outputs] { inputs_.Finish(header, outputs); });
  }

  AdaCompEncodeInputs inputs_;
};

class AdaCompDecodeGpuOp : public OpKernel {
 public:
  explicit AdaCompDecodeGpuOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    std::unique_ptr<AdaCompDecoder> decoder;
    OP_REQUIRES_OK(context, inputs_.Read(context, &decoder));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, DecodeAdaCompOnHost(context, inputs_, decoder.get()));
      return;
    }
    std::vector<float*> reduced;
    bool* finite;
    OP_REQUIRES_OK(context, inputs_.AllocateOutputs(context, &reduced, &finite));
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    const Tensor& payloads = context->input(0);
    *finite = ReduceAdaComp(*decoder, payloads.flat<int32_t>().data(), payloads.NumElements(),
                            reduced, queue.get());
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }

 private:
  AdaCompDecodeInputs inputs_;
};

class AdaCompPutBackGpuOp : public OpKernel {
 public:
  explicit AdaCompPutBackGpuOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    LockedResiduals residuals;
    std::unique_ptr<AdaCompDecoder> decoder;
    OP_REQUIRES_OK(context, inputs_.Read(context, &residuals, &decoder));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, PutBackAdaCompOnHost(context, &residuals, decoder.get()));
      return;
    }
    if (!decoder->finite()) return;
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK(context, queue->Unshare(&residuals));
    const Tensor& payload = context->input(inputs_.payload_input());
    AddAdaComp(*decoder, payload.flat<int32_t>().data(), payload.NumElements(),
               residuals.all_data(), queue.get());
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }

 private:
  AdaCompPutBackInputs inputs_;
};

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("step")
                            .HostMemory("second_moments")
                            .HostMemory("adam_step")
                            .HostMemory("bin_sizes")
                            .HostMemory("payload")
                            .HostMemory("tensor_bytes"),
                        AdaCompEncodeGpuOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode")
                            .Device(DEVICE_GPU)
                            .HostMemory("payloads")
                            .HostMemory("step")
                            .HostMemory("bin_sizes")
                            .HostMemory("finite"),
                        AdaCompDecodeGpuOp);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("payload")
                            .HostMemory("bin_sizes"),
                        AdaCompPutBackGpuOp);

}  // namespace
}  // namespace gradcomp
