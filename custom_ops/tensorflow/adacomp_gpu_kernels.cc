// AdaComp's ops on GPUs. What crosses to the host and back is payloads and what the ops need to know
// beforehand; no stream is waited for. Where the kernels can't be used, an op copies its
// tensors to the host, does there what it does on a CPU, and copies them back.
#include <memory>
#include <vector>

#include "../gpu/adacomp_on_gpu.h"
#include "adacomp_inputs.h"
#include "op_on_gpu.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

class AdaCompEncodeOnGpu : public AdaCompEncodeInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->variables));
    auto* summary =
        static_cast<gpu::EncodeSummary*>(queue->AllocateOnHost(sizeof(gpu::EncodeSummary)));
    const EncodedOnGpu encoded = EncodeAdaComp(Tensors(context, *step), scale_factor(), queue);
    queue->CopyToHost(encoded.summary, sizeof *summary, summary);
    step->variables.Unlock();
    queue->Continue(done, [this, context, done, queue, step, encoded, summary] {
      Send(context, done, queue, *step, encoded, *summary);
    });
    return absl::OkStatus();
  }

 private:
  // Copies the payload once its length is known.
  void Send(OpKernelContext* context, const DoneCallback& done, TensorFlowQueue* queue,
            const Step& step, const EncodedOnGpu& encoded,
            const gpu::EncodeSummary& summary) const {
    const PayloadHeader header = Header(step, summary.finite, summary.body_words);
    Outputs outputs;
    const absl::Status allocated = Allocate(context, header, &outputs);
    const CurrentContext current(queue->driver(), queue->context());
    if (!allocated.ok()) {
      // No op has seen the variables since: each waits for this one.
      TakeBackAdaComp(encoded, queue);
      queue->KeepUntilDone().IgnoreError();  // the first error counts
      context->SetStatus(allocated);
      return done();
    }
    queue->CopyToHost(encoded.body, 4 * summary.body_words, outputs.payload + kHeaderWords);
    queue->Finish(done, [this, header, outputs] { Finish(header, outputs); });
  }
};

class AdaCompDecodeOnGpu : public AdaCompDecodeInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    std::vector<float*> reduced;
    for (size_t i = 0; i < shapes().size(); ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(context->allocate_output(static_cast<int>(i), shapes()[i], &output));
      reduced.push_back(output->flat<float>().data());
    }
    const Tensor& payloads = context->input(0);
    *step->finite = ReduceAdaComp(*step->decoder, payloads.flat<int32_t>().data(),
                                  payloads.NumElements(), reduced, queue);
    return absl::OkStatus();
  }
};

class AdaCompPutBackOnGpu : public AdaCompPutBackInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    if (!step->decoder->finite()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(queue->Unshare(&step->residuals));
    const Tensor& payload = context->input(payload_input());
    AddAdaComp(*step->decoder, payload.flat<int32_t>().data(), payload.NumElements(),
               step->residuals.all_data(), queue);
    return absl::OkStatus();
  }
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
                        AsyncOpOnGpu<AdaCompEncodeOnGpu>);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode")
                            .Device(DEVICE_GPU)
                            .HostMemory("payloads")
                            .HostMemory("step")
                            .HostMemory("bin_sizes")
                            .HostMemory("finite"),
                        OpOnGpu<AdaCompDecodeOnGpu>);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("payload")
                            .HostMemory("bin_sizes"),
                        OpOnGpu<AdaCompPutBackOnGpu>);

}  // namespace
}  // namespace gradcomp
