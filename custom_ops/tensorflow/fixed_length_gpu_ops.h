// The ops of fixed_length_ops.h on GPUs. What crosses to the host and back is payloads. Where the kernels
// can't be used, an op does its work on the host. Settings have two functions of the method, too:
// kEncodeOnGpu and kDecodeOnGpu (gpu/fixed_on_gpu.h).
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_GPU_OPS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_GPU_OPS_H_

#include <memory>
#include <utility>
#include <vector>

#include "../gpu/fixed_on_gpu.h"
#include "../kernels/fixed_length.h"
#include "fixed_length_ops.h"
#include "gpu_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

template <typename Settings>
class FixedLengthEncodeGpuOp : public FixedLengthEncode<Settings, tensorflow::AsyncOpKernel> {
 public:
  using Base = FixedLengthEncode<Settings, tensorflow::AsyncOpKernel>;
  using Base::Base;

  void ComputeAsync(tensorflow::OpKernelContext* context,
                    tensorflow::AsyncOpKernel::DoneCallback done) override {
    auto step = std::make_shared<typename Base::Step>();
    OP_REQUIRES_OK_ASYNC(context, this->Read(context, step.get()), done);
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK_ASYNC(context, this->OnHost(context, step.get()), done);
      step->residuals.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK_ASYNC(context, queue->Unshare(&step->residuals), done);
    std::vector<Source> sources;
    for (int i = 0; i < this->num_tensors_; ++i) {
      const tensorflow::Tensor& gradient = context->input(this->num_tensors_ + i);
      sources.push_back(
          {step->residuals.data(i), gradient.data(), ToGradientType(gradient.dtype())});
    }
    auto* not_finite = static_cast<int*>(queue->AllocateOnHost(sizeof(int)));
    const EncodedFixedOnGpu encoded =
        Settings::kEncodeOnGpu(step->codecs, sources, step->sender, queue.get());
    const int64_t body_words = PayloadWords(step->codecs) - kHeaderWords;
    queue->CopyToHost(encoded.body, 4 * body_words, step->payload + kHeaderWords);
    if (encoded.not_finite) {
      queue->CopyToHost(encoded.not_finite, sizeof(int), not_finite);
    } else if (not_finite) {
      *not_finite = 0;
    }
    // What comes behind on the stream sees the residuals as they are then.
    step->residuals.Unlock();
    queue->Finish(done, [step, not_finite] {
      WriteFixedHeader(step->codecs, step->sender, *not_finite == 0, step->payload);
    });
  }
};

template <typename Settings>
class FixedLengthDecodeGpuOp : public FixedLengthDecodeOp<Settings> {
 public:
  using Base = FixedLengthDecodeOp<Settings>;
  using Base::Base;

 protected:
  absl::Status Reduce(tensorflow::OpKernelContext* context, const Codecs& codecs,
                      const FixedLengthDecoder& decoder, bool* finite) const override {
    const KernelsOnGpu* kernels = UsableKernels(context);
    // Where a sum may overflow, the host finds out whether one does.
    if (!kernels || !decoder.ReducesToFinite()) {
      return Base::Reduce(context, codecs, decoder, finite);
    }
    std::vector<float*> outputs;
    for (int i = 0; i < this->num_tensors_; ++i) {
      tensorflow::Tensor* output;
      TF_RETURN_IF_ERROR(context->allocate_output(i, this->shape(i), &output));
      outputs.push_back(output->flat<float>().data());
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    Settings::kDecodeOnGpu(codecs, decoder, outputs, /*adds=*/false, queue.get());
    *finite = true;
    return queue->KeepUntilDone();
  }
};

template <typename Settings>
class FixedLengthPutBackGpuOp : public FixedLengthPutBackOp<Settings> {
 public:
  using Base = FixedLengthPutBackOp<Settings>;
  using Base::Base;

 protected:
  absl::Status AddTo(tensorflow::OpKernelContext* context, const Codecs& codecs,
                     const FixedLengthDecoder& decoder,
                     LockedResiduals* residuals) const override {
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) return Base::AddTo(context, codecs, decoder, residuals);
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    TF_RETURN_IF_ERROR(queue->Unshare(residuals));
    Settings::kDecodeOnGpu(codecs, decoder, residuals->all_data(), /*adds=*/true, queue.get());
    return queue->KeepUntilDone();
  }
};

}  // namespace gradcomp

// Registers the kernels of <Method>Encode, <Method>Decode and <Method>PutBack for both devices. Behind
// the method and its settings come the HostMemory(...) of its own inputs: all of Encode's, and what the
// others have of them.
#define GRADCOMP_FIXED_LENGTH_KERNELS(method, Settings, encode_inputs, other_inputs)               \
  REGISTER_KERNEL_BUILDER(Name(method "Encode").Device(tensorflow::DEVICE_CPU),                    \
                          FixedLengthEncodeOp<Settings>);                                          \
  REGISTER_KERNEL_BUILDER(Name(method "Decode").Device(tensorflow::DEVICE_CPU),                    \
                          FixedLengthDecodeOp<Settings>);                                          \
  REGISTER_KERNEL_BUILDER(Name(method "PutBack").Device(tensorflow::DEVICE_CPU),                   \
                          FixedLengthPutBackOp<Settings>);                                         \
  REGISTER_KERNEL_BUILDER(Name(method "Encode")                                                    \
                              .Device(tensorflow::DEVICE_GPU)                                      \
                              .HostMemory("residuals")                                             \
                              .HostMemory("step")                                                  \
                              .HostMemory("payload")                                               \
                              .HostMemory("tensor_bytes") encode_inputs,                           \
                          FixedLengthEncodeGpuOp<Settings>);                                       \
  REGISTER_KERNEL_BUILDER(Name(method "Decode")                                                    \
                              .Device(tensorflow::DEVICE_GPU)                                      \
                              .HostMemory("payloads")                                              \
                              .HostMemory("step")                                                  \
                              .HostMemory("finite") other_inputs,                                  \
                          FixedLengthDecodeGpuOp<Settings>);                                       \
  REGISTER_KERNEL_BUILDER(Name(method "PutBack")                                                   \
                              .Device(tensorflow::DEVICE_GPU)                                      \
                              .HostMemory("residuals")                                             \
                              .HostMemory("payload") other_inputs,                                 \
                          FixedLengthPutBackGpuOp<Settings>)

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_GPU_OPS_H_
