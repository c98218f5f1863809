// The ops of fixed_length_ops.h on GPUs. What crosses to the host and back is payloads. Where the kernels
// can't be used, an op does its work on the host. Settings have these functions of a method, too:
//
//   static EncodedFixedOnGpu EncodeOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
//                                        GpuQueue* queue);
//   static void ReduceOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
//                           const std::vector<float*>& outputs, GpuQueue* queue);
//   static void AddOnGpu(...);  // likewise
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_GPU_OPS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_GPU_OPS_H_

#include <memory>
#include <utility>
#include <vector>

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
    const auto encoded = Settings::EncodeOnGpu(step->codecs, sources, queue.get());
    const int64_t body_words = PayloadWords(step->codecs) - kHeaderWords;
    queue->CopyToHost(encoded.body, 4 * body_words, step->payload + kHeaderWords);
    if (encoded.not_finite) {
      queue->CopyToHost(encoded.not_finite, sizeof(int), not_finite);
    } else if (not_finite) {
      *not_finite = 0;
    }
    // What comes behind on the stream sees the residuals as they are then.
    step->residuals.Unlock();
    const bool goes_on = queue->Then([step, done, not_finite] {
      WriteFixedHeader(step->codecs, step->sender, *not_finite == 0, step->payload);
      done();
    });
    if (goes_on) return;
    context->SetStatus(queue->KeepUntilDone());
    done();
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
    Settings::ReduceOnGpu(codecs, decoder, outputs, queue.get());
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
    Settings::AddOnGpu(codecs, decoder, residuals->all_data(), queue.get());
    return queue->KeepUntilDone();
  }
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_FIXED_LENGTH_GPU_OPS_H_
