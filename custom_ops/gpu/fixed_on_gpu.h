// Submits the work of methods with payloads of fixed length to a queue.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/fixed_length.h"
#include "../kernels/whole_codec.h"
#include "fixed_tables.h"
#include "queue.h"

namespace gradcomp {

// A payload without its header, in device memory, valid once the queue has done its work.
struct EncodedFixedOnGpu {
  const int32_t* body;    // zeros if not all sums are finite; null if the payload has no words
  const int* not_finite;  // 0 if all sums are finite; null if there are none
};

// A method has two functions, which do the work of kernels/fixed_length.h for the method's codecs
// and WholeCodec. Residuals, gradients and values have device pointers.
using EncodeOnGpu = EncodedFixedOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                      const Sender& sender, GpuQueue* queue);
// Decodes payloads whose sums are known to be finite, or a single payload. Adds to the values if
// `adds`, and otherwise overwrites them.
using DecodeOnGpu = void(const Codecs& codecs, const FixedLengthDecoder& decoder,
                         const std::vector<float*>& values, bool adds, GpuQueue* queue);

// The tensors as the kernels get them, of a type derived from gpu::FixedTensor.
template <typename Tensor>
struct FixedPlan {
  std::vector<Tensor> tensors;
  int64_t num_slices = 0;
  int64_t num_words = 0;
};

// describe(codec, &tensor) sets the method's own members, for tensors that are not sent whole.
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

// Uploads the tensors of an encoder; the method sets the other members of the step.
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
