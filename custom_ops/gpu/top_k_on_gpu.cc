#include "top_k_on_gpu.h"

#include "../kernels/top_k_codec.h"
#include "top_k_tables.h"

namespace gradcomp {
namespace {

struct Planned {
  std::vector<gpu::TopKTensor> tensors;
  int64_t num_slices = 0;
  int64_t num_words = 0;
};

Planned Plan(const Codecs& codecs) {
  Planned planned;
  for (const auto& codec : codecs) {
    const auto* top_k = dynamic_cast<const TopKCodec*>(codec.get());
    gpu::TopKTensor tensor = {};
    tensor.sent_whole = top_k == nullptr;
    tensor.size = codec->size();
    tensor.entries = top_k ? top_k->entries() : codec->size();
    tensor.first_slice = planned.num_slices;
    tensor.first_word = planned.num_words;
    planned.tensors.push_back(tensor);
    planned.num_slices += CeilDiv(codec->size(), gpu::kSliceElements);
    planned.num_words += codec->words();
  }
  return planned;
}

template <typename Value>
Value* NewZeros(GpuQueue* queue, int64_t size) {
  Value* zeros = NewOnGpu<Value>(queue, size);
  queue->Zero(zeros, size * int64_t{sizeof(Value)});
  return zeros;
}

void Decode(const Codecs& codecs, const FixedLengthDecoder& decoder,
            const std::vector<float*>& values, bool adds, GpuQueue* queue) {
  Planned planned = Plan(codecs);
  if (planned.num_slices == 0) return;
  for (size_t i = 0; i < values.size(); ++i) planned.tensors[i].values = values[i];
  std::vector<int32_t> bodies;
  for (const PayloadView& payload : decoder.payloads()) {
    if (payload.header.non_finite()) continue;
    bodies.insert(bodies.end(), payload.body(), payload.body() + planned.num_words);
  }
  gpu::TopKDecodeStep step = {};
  step.tensors = CopyToGpu(queue, planned.tensors);
  step.num_tensors = planned.tensors.size();
  step.bodies = CopyToGpu(queue, bodies);
  step.body_words = planned.num_words;
  step.num_payloads = static_cast<int>(bodies.size() / planned.num_words);
  step.adds = adds;
  queue->Launch("gradcomp_top_k_decode", planned.num_slices, &step);
}

}  // namespace

EncodedFixedOnGpu EncodeTopKOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                  GpuQueue* queue) {
  Planned planned = Plan(codecs);
  if (planned.num_slices == 0) return {nullptr, nullptr};
  std::vector<gpu::TopKLast> last;
  for (size_t i = 0; i < sources.size(); ++i) {
    gpu::TopKTensor& tensor = planned.tensors[i];
    tensor.values = sources[i].residual;
    tensor.gradient = sources[i].gradient;
    tensor.gradient_type = static_cast<int>(sources[i].type);
    last.push_back({0, tensor.entries});
  }
  const int64_t num_tensors = planned.tensors.size();
  gpu::TopKEncodeStep step = {};
  step.tensors = CopyToGpu(queue, planned.tensors);
  step.num_tensors = num_tensors;
  step.histograms = NewZeros<unsigned long long>(queue, num_tensors * gpu::kTopKDigits);
  step.last = CopyToGpu(queue, last);
  step.counts = NewOnGpu<gpu::TopKCounts>(queue, planned.num_slices);
  step.not_finite = NewZeros<int>(queue, 1);
  step.body = NewZeros<int>(queue, planned.num_words);
  // Magnitudes are 31 bits: a first digit of 11, exponent and 3 bits of the mantissa, then two of 10.
  for (const auto& [shift, num_digits] : {std::pair{20, 1 << 11}, {10, 1 << 10}, {0, 1 << 10}}) {
    step.shift = shift;
    step.num_digits = num_digits;
    queue->Launch("gradcomp_top_k_count", planned.num_slices, &step);
    queue->Launch("gradcomp_top_k_pick", num_tensors, &step);
  }
  queue->Launch("gradcomp_top_k_tally", planned.num_slices, &step);
  queue->Launch("gradcomp_top_k_places", num_tensors, &step);
  queue->Launch("gradcomp_top_k_send", planned.num_slices, &step);
  return {step.body, step.not_finite};
}

void ReduceTopKOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                     const std::vector<float*>& outputs, GpuQueue* queue) {
  Decode(codecs, decoder, outputs, /*adds=*/false, queue);
}

void AddTopKOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                  const std::vector<float*>& values, GpuQueue* queue) {
  Decode(codecs, decoder, values, /*adds=*/true, queue);
}

}  // namespace gradcomp
