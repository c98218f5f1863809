// The ops of fixed_length_ops.h on GPUs. What crosses to the host and back is payloads. Where the kernels
// can't be used, an op does its work on the host. Settings have two functions of the method, too:
// kEncodeOnGpu and kDecodeOnGpu (gpu/fixed_on_gpu.h).
#pragma once

#include <memory>
#include <vector>

#include "../gpu/fixed_on_gpu.h"
#include "../kernels/fixed_length.h"
#include "fixed_length_ops.h"
#include "op_on_device.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

template <typename Settings>
class FixedLengthEncodeOnGpu : public FixedLengthEncodeInputs<Settings> {
 public:
  using Step = typename FixedLengthEncodeInputs<Settings>::Step;

  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step,
                     TensorFlowQueue* queue, const DoneCallback& done) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->residuals));
    const EncodedFixedOnGpu encoded =
        Settings::kEncodeOnGpu(step->codecs, SourcesOf(context, step->residuals, this->num_tensors_),
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
};

template <typename Settings>
class FixedLengthDecodeOnGpu : public FixedLengthDecodeInputs<Settings> {
 public:
  using Step = typename FixedLengthDecodeInputs<Settings>::Step;

  absl::Status OnGpu(OpKernelContext* context, Step* step,
                     TensorFlowQueue* queue) const {
    // Where a sum may overflow, the host finds out whether one does.
    if (!step->decoder->ReducesToFinite()) return this->OnHost(context, step);
    std::vector<float*> reduced;
    for (int i = 0; i < this->num_tensors_; ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(context->allocate_output(i, this->shape(i), &output));
      reduced.push_back(output->flat<float>().data());
    }
    Settings::kDecodeOnGpu(step->codecs, *step->decoder, reduced, /*adds=*/false, queue);
    *step->finite = true;
    return absl::OkStatus();
  }
};

template <typename Settings>
class FixedLengthPutBackOnGpu : public FixedLengthPutBackInputs<Settings> {
 public:
  using Step = typename FixedLengthPutBackInputs<Settings>::Step;

  absl::Status OnGpu(OpKernelContext*, Step* step, TensorFlowQueue* queue) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->residuals));
    Settings::kDecodeOnGpu(step->codecs, *step->decoder, step->residuals.all_data(),
                           /*adds=*/true, queue);
    return absl::OkStatus();
  }
};

}  // namespace gradcomp

// Registers the kernels of <Method>Encode, <Method>Decode and <Method>PutBack for both devices. Behind
// the method and its settings come the HostMemory(...) of its own inputs: all of Encode's, and what the
// others have of them.
#define GRADCOMP_FIXED_LENGTH_KERNELS(method, Settings, encode_inputs, other_inputs)               \
  REGISTER_KERNEL_BUILDER(Name(method "Encode").Device(DEVICE_CPU),                    \
                          OpOnHost<FixedLengthEncodeInputs<Settings>>);                            \
  REGISTER_KERNEL_BUILDER(Name(method "Decode").Device(DEVICE_CPU),                    \
                          OpOnHost<FixedLengthDecodeInputs<Settings>>);                            \
  REGISTER_KERNEL_BUILDER(Name(method "PutBack").Device(DEVICE_CPU),                   \
                          OpOnHost<FixedLengthPutBackInputs<Settings>>);                           \
  REGISTER_KERNEL_BUILDER(Name(method "Encode")                                                    \
                              .Device(DEVICE_GPU)                                      \
                              .HostMemory("residuals")                                             \
                              .HostMemory("step")                                                  \
                              .HostMemory("payload")                                               \
                              .HostMemory("tensor_bytes") encode_inputs,                           \
                          AsyncOpOnGpu<FixedLengthEncodeOnGpu<Settings>>);                         \
  REGISTER_KERNEL_BUILDER(Name(method "Decode")                                                    \
                              .Device(DEVICE_GPU)                                      \
                              .HostMemory("payloads")                                              \
                              .HostMemory("step")                                                  \
                              .HostMemory("finite") other_inputs,                                  \
                          OpOnGpu<FixedLengthDecodeOnGpu<Settings>>);                              \
  REGISTER_KERNEL_BUILDER(Name(method "PutBack")                                                   \
                              .Device(DEVICE_GPU)                                      \
                              .HostMemory("residuals")                                             \
                              .HostMemory("payload") other_inputs,                                 \
                          OpOnGpu<FixedLengthPutBackOnGpu<Settings>>)
