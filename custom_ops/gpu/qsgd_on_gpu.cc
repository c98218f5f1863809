#include "qsgd_on_gpu.h"

#include "../kernels/qsgd_codec.h"
#include "qsgd_tables.h"

namespace gradcomp {
namespace {

constexpr int64_t kLargestOfWarp = 4096;  // the largest bucket that a warp measures; blocks measure larger buckets

static_assert(kBucketStep == 32, "the kernels pack so many levels into whole words");

FixedPlan<gpu::QsgdTensor> QsgdPlan(const Codecs& codecs) {
  return PlanFixed<gpu::QsgdTensor, QsgdCodec>(
      codecs, [](const QsgdCodec& codec, gpu::QsgdTensor* tensor) {
        tensor->bucket_size = codec.settings().bucket_size;
        tensor->bits = codec.settings().bits;
      });
}

// The members that only an encoder needs.
struct Measured {
  int64_t num_buckets = 0;
  int64_t num_pieces = 0;
};

Measured PlanMeasuring(std::vector<gpu::QsgdTensor>* tensors) {
  Measured measured;
  for (gpu::QsgdTensor& tensor : *tensors) {
    if (tensor.sent_whole) tensor.bucket_size = gpu::kSliceElements;
    tensor.width = tensor.bucket_size <= kLargestOfWarp ? gpu::kLanes : gpu::kThreads;
    tensor.first_bucket = measured.num_buckets;
    tensor.first_piece = measured.num_pieces;
    const int64_t num_buckets = CeilDiv(tensor.size, tensor.bucket_size);
    measured.num_buckets += num_buckets;
    measured.num_pieces += CeilDiv(num_buckets, gpu::kThreads / tensor.width);
  }
  return measured;
}

}  // namespace

EncodedFixedOnGpu EncodeQsgdOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                  const Sender& sender, GpuQueue* queue) {
  FixedPlan<gpu::QsgdTensor> plan = QsgdPlan(codecs);
  if (plan.num_slices == 0) return {nullptr, nullptr};
  const Measured measured = PlanMeasuring(&plan.tensors);
  gpu::QsgdEncodeStep step = {};
  StartFixed(plan, sources, queue, &step);
  step.scales = NewOnGpu<gpu::QsgdScale>(queue, measured.num_buckets);
  step.replica = sender.replica;
  step.step = sender.step;
  queue->Launch("gradcomp_qsgd_measure", measured.num_pieces, &step);
  queue->Launch("gradcomp_qsgd_send", plan.num_slices, &step);
  return {step.body, step.not_finite};
}

void DecodeQsgdOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                     const std::vector<float*>& values, bool adds, GpuQueue* queue) {
  DecodeFixed("gradcomp_qsgd_decode", QsgdPlan(codecs), decoder, values, adds, queue);
}

}  // namespace gradcomp
