#include "top_k_on_gpu.h"

#include "../kernels/top_k_codec.h"
#include "top_k_tables.h"

namespace gradcomp {
namespace {

FixedPlan<gpu::TopKTensor> TopKPlan(const Codecs& codecs) {
  return PlanFixed<gpu::TopKTensor, TopKCodec>(
      codecs, [](const TopKCodec& codec, gpu::TopKTensor* tensor) {
        tensor->entries = codec.entries();
      });
}

}  // namespace

EncodedFixedOnGpu EncodeTopKOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                  const Sender&, GpuQueue* queue) {
  const FixedPlan<gpu::TopKTensor> plan = TopKPlan(codecs);
  if (plan.num_slices == 0) return {nullptr, nullptr};
  std::vector<gpu::TopKLast> last;
  for (const gpu::TopKTensor& tensor : plan.tensors) last.push_back({0, tensor.entries});
  const int64_t num_tensors = plan.tensors.size();
  gpu::TopKEncodeStep step = {};
  StartFixed(plan, sources, queue, &step);
  step.histograms = NewZeros<unsigned long long>(queue, num_tensors * gpu::kTopKDigits);
  step.last = CopyToGpu(queue, last);
  step.counts = NewOnGpu<gpu::TopKCounts>(queue, plan.num_slices);
  // Magnitudes have 31 bits: a first digit of 11 bits, the exponent and 3 bits of the mantissa, and
  // two digits of 10 bits.
  for (const auto& [shift, num_digits] : {std::pair{20, 1 << 11}, {10, 1 << 10}, {0, 1 << 10}}) {
    step.shift = shift;
    step.num_digits = num_digits;
    queue->Launch("gradcomp_top_k_count", plan.num_slices, &step);
    queue->Launch("gradcomp_top_k_pick", num_tensors, &step);
  }
  queue->Launch("gradcomp_top_k_tally", plan.num_slices, &step);
  queue->Launch("gradcomp_top_k_places", num_tensors, &step);
  queue->Launch("gradcomp_top_k_send", plan.num_slices, &step);
  return {step.body, step.not_finite};
}

void DecodeTopKOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                     const std::vector<float*>& values, bool adds, GpuQueue* queue) {
  DecodeFixed("gradcomp_top_k_decode", TopKPlan(codecs), decoder, values, adds, queue);
}

}  // namespace gradcomp
