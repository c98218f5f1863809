// AdaComp's ops on GPUs. What crosses to the host and back is payloads and what the ops need to know
// beforehand; no stream is waited for. Where the kernels can't be used, an op copies its
// tensors to the host, does there what it does on a CPU, and copies them back.
#include <memory>
#include <utility>
#include <vector>

#include "../gpu/adacomp_on_gpu.h"
#include "adacomp_inputs.h"
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

absl::Status UnshareOnGpu(OpKernelContext* context, TensorFlowQueue* queue,
                          LockedResiduals* variables) {
  return variables->Unshare(context, [queue](const float* from, int64_t size, float* to) {
    queue->CopyOnGpu(from, 4 * size, to);
    return queue->ToTensorFlow();
  });
}

// Copies of variables on the host, which are written back.
class VariablesOnHost {
 public:
  absl::Status Read(OpKernelContext* context, const LockedResiduals& variables) {
    copies_.resize(variables.size());
    for (int i = 0; i < variables.size(); ++i) {
      TF_RETURN_IF_ERROR(CopyToHost(context, *variables.tensor(i), &copies_[i]));
    }
    return absl::OkStatus();
  }

  // Into new buffers: values that were read may share the old ones.
  absl::Status Write(OpKernelContext* context, const LockedResiduals& variables) const {
    for (int i = 0; i < variables.size(); ++i) {
      Tensor on_device;
      TF_RETURN_IF_ERROR(
          context->allocate_temp(copies_[i].dtype(), copies_[i].shape(), &on_device));
      TF_RETURN_IF_ERROR(CopyToDevice(context, copies_[i], &on_device));
      *variables.tensor(i) = on_device;
    }
    return absl::OkStatus();
  }

  float* data(int i) { return copies_[i].flat<float>().data(); }
  std::vector<float*> all_data() {
    std::vector<float*> all;
    for (size_t i = 0; i < copies_.size(); ++i) all.push_back(data(static_cast<int>(i)));
    return all;
  }

 private:
  std::vector<Tensor> copies_;
};

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
      OP_REQUIRES_OK_ASYNC(context, EncodeOnHost(context, step.get()), done);
      step->variables.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK_ASYNC(context, UnshareOnGpu(context, queue.get(), &step->variables), done);
    auto* summary =
        static_cast<gpu::EncodeSummary*>(queue->AllocateOnHost(sizeof(gpu::EncodeSummary)));
    const EncodedOnGpu encoded = EncodeAdaComp(inputs_.Tensors(context, *step),
                                               inputs_.scale_factor(), step->adam, queue.get());
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
    int32_t* words;
    OP_REQUIRES_OK_ASYNC(context, inputs_.AllocatePayload(context, header, &words), done);
    const CurrentContext current(queue->driver(), queue->context());
    queue->CopyToHost(encoded.body, 4 * summary.body_words, words + kHeaderWords);
    const bool goes_on = queue->Then([this, context, done, header, words] {
      OP_REQUIRES_OK_ASYNC(context, inputs_.FinishPayload(context, header, words), done);
      done();
    });
    if (goes_on) return;
    context->SetStatus(queue->KeepUntilDone());
    done();
  }

  absl::Status EncodeOnHost(OpKernelContext* context, AdaCompEncodeInputs::Step* step) const {
    VariablesOnHost variables;
    TF_RETURN_IF_ERROR(variables.Read(context, step->variables));
    std::vector<EncoderTensor> tensors = inputs_.Tensors(context, *step);
    const int num_tensors = static_cast<int>(tensors.size());
    std::vector<Tensor> gradients(num_tensors);
    std::vector<Tensor> squares(num_tensors);
    for (int i = 0; i < num_tensors; ++i) {
      TF_RETURN_IF_ERROR(CopyToHost(context, context->input(num_tensors + i), &gradients[i]));
      tensors[i].residual = variables.data(i);
      tensors[i].gradient = gradients[i].data();
      if (tensors[i].squares) {
        const Tensor& given = context->input(inputs_.first_squares() + i);
        TF_RETURN_IF_ERROR(CopyToHost(context, given, &squares[i]));
        tensors[i].squares = squares[i].flat<float>().data();
      }
      if (tensors[i].second_moment) tensors[i].second_moment = variables.data(num_tensors + i);
    }
    AdaCompEncoder encoder(tensors, inputs_.scale_factor(), ThreadPool(context), BestSimd(),
                           step->adam);
    const bool finite = encoder.Run();
    const PayloadHeader header = inputs_.Header(*step, finite, encoder.body_words());
    int32_t* words;
    TF_RETURN_IF_ERROR(inputs_.AllocatePayload(context, header, &words));
    if (finite) encoder.WriteBody(words + kHeaderWords);
    TF_RETURN_IF_ERROR(inputs_.FinishPayload(context, header, words));
    return variables.Write(context, step->variables);
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
    std::vector<float*> reduced;
    bool* finite;
    OP_REQUIRES_OK(context, inputs_.AllocateOutputs(context, &reduced, &finite));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, DecodeOnHost(context, decoder.get(), finite));
      return;
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    const Tensor& payloads = context->input(0);
    *finite = ReduceAdaComp(*decoder, payloads.flat<int32_t>().data(), payloads.NumElements(),
                            reduced, queue.get());
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }

 private:
  absl::Status DecodeOnHost(OpKernelContext* context, AdaCompDecoder* decoder,
                            bool* finite) const {
    const int num_tensors = static_cast<int>(inputs_.shapes().size());
    std::vector<Tensor> on_host(num_tensors);
    std::vector<float*> sums;
    for (int i = 0; i < num_tensors; ++i) {
      TF_RETURN_IF_ERROR(CopyToHost(context, *context->mutable_output(i), &on_host[i]));
      sums.push_back(on_host[i].flat<float>().data());
    }
    *finite = decoder->Reduce(sums);
    for (int i = 0; i < num_tensors; ++i) {
      TF_RETURN_IF_ERROR(CopyToDevice(context, on_host[i], context->mutable_output(i)));
    }
    return absl::OkStatus();
  }

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
    if (!decoder->finite()) return;
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      VariablesOnHost variables;
      OP_REQUIRES_OK(context, variables.Read(context, residuals));
      decoder->AddTo(variables.all_data());
      OP_REQUIRES_OK(context, variables.Write(context, residuals));
      return;
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK(context, UnshareOnGpu(context, queue.get(), &residuals));
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
