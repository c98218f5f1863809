// What gives work of methods whose payloads have a fixed length to a queue: what they share.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/fixed_length.h"
#include "../kernels/whole_codec.h"
#include "fixed_tables.h"
#include "queue.h"

namespace gradcomp {

// A payload behind its header, in the memory of the device, once the queue has done its work.
struct EncodedFixedOnGpu {
  const int32_t* body;    // zeros if not all is finite; null if it has no words
  const int* not_finite;  // 0 if all sums are finite; null if there are none
};

// A method has two functions, which do what those of kernels/fixed_length.h do with its codecs and
// WholeCodec; pointers of residuals, gradients and values are the device's.
using EncodeOnGpu = EncodedFixedOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                      const Sender& sender, GpuQueue* queue);
// Of a decoder whose sums are known to be finite, or of one payload. If `adds`, it adds to the values, and
// otherwise overwrites them.
using DecodeOnGpu = void(const Codecs& codecs, const FixedLengthDecoder& decoder,
                         const std::vector<float*>& values, bool adds, GpuQueue* queue);

// Tensors as the kernels know them: of a type that is a gpu::FixedTensor.
template <typename Tensor>
struct FixedPlan {
  std::vector<Tensor> tensors;
  int64_t num_slices = 0;
  int64_t num_words = 0;
};

// describe(codec, &tensor) writes what the method says of tensors that are not sent whole.
template <typename Tensor, typename MethodCodec, typename Describe>
FixedPlan<Tensor> PlanFixed(const Codecs& codecs, const Describe& describe) {
  FixedPlan<Tensor> plan;
  for (const auto& codec : codecs) {
    Tensor tensor = {};
    tensor.sent_whole = dynamic_cast<const WholeCodec*>(codec.get()) != nullptr;
    tensor.size = codec->size();
    tensor.first_slice = plan.num_slices;
    tensor.first_word = plan.num_words;
    if (!tensor.sent_whole) describe(static_cast<const MethodCodec&>(*codec), &tensor);
    plan.tensors.push_back(tensor);
    plan.num_slices += CeilDiv(codec->size(), gpu::kSliceElements);
    plan.num_words += codec->words();
  }
  return plan;
}

template <typename Value>
Value* NewZeros(GpuQueue* queue, int64_t size) {
  Value* zeros = NewOnGpu<Value>(queue, size);
  queue->Zero(zeros, size * int64_t{sizeof(Value)});
  return zeros;
}

// Gives the tensors of an encoder to the queue; what is left of the step is the method's.
template <typename Tensor>
void StartFixed(FixedPlan<Tensor> plan, const std::vector<Source>& sources, GpuQueue* queue,
                gpu::FixedEncodeStep<Tensor>* step) {
  for (size_t i = 0; i < sources.size(); ++i) {
    plan.tensors[i].values = sources[i].residual;
    plan.tensors[i].gradient = sources[i].gradient;
    plan.tensors[i].gradient_type = static_cast<int>(sources[i].type);
  }
  step->tensors = CopyToGpu(queue, plan.tensors);
  step->num_tensors = plan.tensors.size();
  step->not_finite = NewZeros<int>(queue, 1);
  step->body = NewZeros<int>(queue, plan.num_words);
}

// Launches a kernel whose parameter is a gpu::FixedDecodeStep.
template <typename Tensor>
void DecodeFixed(const char* kernel, FixedPlan<Tensor> plan, const FixedLengthDecoder& decoder,
                 const std::vector<float*>& values, bool adds, GpuQueue* queue) {
  if (plan.num_slices == 0) return;
  for (size_t i = 0; i < values.size(); ++i) plan.tensors[i].values = values[i];
  gpu::FixedDecodeStep<Tensor> step = {};
  step.tensors = CopyToGpu(queue, plan.tensors);
  step.num_tensors = plan.tensors.size();
  step.adds = adds;
  const std::vector<PayloadView>& payloads = decoder.payloads();
  if (decoder.finite() && !payloads.empty()) {
    const int32_t* first = payloads.front().body();
    const int32_t* end = payloads.back().body() + plan.num_words;
    step.bodies = static_cast<int*>(queue->Upload(first, 4 * (end - first)));
    step.num_payloads = static_cast<int>(payloads.size());
    step.row_words = payloads.size() > 1 ? payloads[1].body() - first : plan.num_words;
  }
  queue->Launch(kernel, plan.num_slices, &step);
}

}  // namespace gradcomp
