// The ops of methods with payloads of fixed length. In addition to the members in decode_ops.h,
// their settings derive from FixedLengthMethod, and have the method's function `kEncodeOnGpu`
// (gpu/fixed_on_gpu.h). NewCodec returns a std::unique_ptr<const Codec>.
#pragma once

#include <memory>
#include <vector>

#include "../gpu/fixed_on_gpu.h"
#include "../kernels/fixed_length.h"
#include "decode_ops.h"
#include "shape_support.h"
#include "tensorflow/core/framework/op.h"

namespace gradcomp {

template <Method method>
struct FixedLengthMethod {
  using Decoder = FixedLengthDecoder;
  static constexpr Method kMethod = method;
  static constexpr bool kDependsOnReplica = false;  // true: Encode has an input `replica`, the replica's number

  absl::Status Read(OpKernelConstruction*) { return absl::OkStatus(); }

  static std::unique_ptr<Decoder> NewDecoder(const Codecs& codecs, int64_t fingerprint,
                                             int64_t plan, const ParallelFor& parallel_for) {
    return std::make_unique<Decoder>(codecs, method, fingerprint, plan, parallel_for);
  }
};

template <typename Settings>
class FixedLengthEncodeInputs : public PayloadInputs<Settings> {
  using Base = PayloadInputs<Settings>;

 public:
  struct Step {
    Sender sender;
    LockedResiduals residuals;
    Codecs codecs;
    int32_t* payload;  // the output
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(Base::ReadAttributes(context));
    constexpr int kOwnInputs = (Settings::kDependsOnReplica ? 2 : 1) + Base::kMainInputs;
    return CheckOneGradientEach(context, num_tensors_, kOwnInputs);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    std::vector<int64_t> main;
    TF_RETURN_IF_ERROR(this->GetMain(context, &main));
    step->sender = {Settings::kMethod, this->fingerprint_, PlanOf(main), 0, 0};
    TF_RETURN_IF_ERROR(GetScalar(context, 2 * num_tensors_, "step", &step->sender.step));
    if constexpr (Settings::kDependsOnReplica) {
      TF_RETURN_IF_ERROR(
          GetScalar(context, 2 * num_tensors_ + 1, "replica", &step->sender.replica));
    }
    TF_RETURN_IF_ERROR(step->residuals.Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->residuals, num_tensors_));
    step->codecs = this->NewCodecs(main, step->residuals);
    Tensor* payload;
    Tensor* tensor_bytes;
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, PayloadWords(step->codecs), &payload));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {num_tensors_}, &tensor_bytes));
    for (int i = 0; i < num_tensors_; ++i) {
      tensor_bytes->flat<int64_t>()(i) = 4 * step->codecs[i]->words();
    }
    step->payload = payload->flat<int32_t>().data();
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(host.Sources(&step->residuals, num_tensors_, /*writes=*/true, &sources));
    EncodeFixedLength(step->codecs, sources, step->sender, ThreadPool(context), step->payload);
    return host.Finish();
  }

  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->residuals));
    const EncodedFixedOnGpu encoded =
        Settings::kEncodeOnGpu(step->codecs, SourcesOf(context, step->residuals, num_tensors_),
                               step->sender, queue);
    const int64_t body_words = PayloadWords(step->codecs) - kHeaderWords;
    queue->CopyToHost(encoded.body, 4 * body_words, step->payload + kHeaderWords);
    const int* not_finite = queue->FlagToHost(encoded.not_finite);
    step->residuals.Unlock();
    queue->Finish(done, [step, not_finite] {
      WriteFixedHeader(step->codecs, step->sender, *not_finite == 0, step->payload);
    });
    return absl::OkStatus();
  }

 private:
  using Base::num_tensors_;
};

}  // namespace gradcomp

// Registers the kernels of <Method>Encode, <Method>Decode and <Method>PutBack for both devices. The
// last arguments have HostMemory(...) for the method's own inputs, of Encode and of the other ops.
#define GRADCOMP_FIXED_LENGTH_KERNELS(method, Settings, encode_inputs, other_inputs)   \
  GRADCOMP_DECODE_KERNELS(method, Settings, other_inputs);                             \
  REGISTER_KERNEL_BUILDER(Name(method "Encode").Device(DEVICE_CPU),                    \
                          OpOnHost<FixedLengthEncodeInputs<Settings>>);                \
  REGISTER_KERNEL_BUILDER(Name(method "Encode")                                        \
                              .Device(DEVICE_GPU)                                      \
                              .HostMemory("residuals")                                 \
                              .HostMemory("step")                                      \
                              .HostMemory("payload")                                   \
                              .HostMemory("tensor_bytes") encode_inputs,               \
                          AsyncOpOnGpu<FixedLengthEncodeInputs<Settings>>)
