#include "sign_sgd_on_gpu.h"

#include "../kernels/sign_sgd_codec.h"
#include "sign_sgd_tables.h"

namespace gradcomp {
namespace {

static_assert(gpu::kSignSgdBlock == kBlockSize && gpu::kSignSgdLanes == SignSgdCodec::kLanes,
              "sums have the order of the CPU's");

FixedPlan<gpu::SignSgdTensor> SignSgdPlan(const Codecs& codecs) {
  int64_t num_blocks = 0;
  return PlanFixed<gpu::SignSgdTensor, SignSgdCodec>(
      codecs, [&](const SignSgdCodec& codec, gpu::SignSgdTensor* tensor) {
        tensor->first_block = num_blocks;
        tensor->num_blocks = codec.num_blocks();
        num_blocks += codec.num_blocks();
      });
}

}  // namespace

EncodedFixedOnGpu EncodeSignSgdOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                     const Sender&, GpuQueue* queue) {
  const FixedPlan<gpu::SignSgdTensor> plan = SignSgdPlan(codecs);
  if (plan.num_slices == 0) return {nullptr, nullptr};
  const int64_t num_blocks = plan.tensors.back().first_block + plan.tensors.back().num_blocks;
  const int64_t num_tensors = plan.tensors.size();
  gpu::SignSgdEncodeStep step = {};
  StartFixed(plan, sources, queue, &step);
  step.block_sums = NewOnGpu<double>(queue, num_blocks);
  step.means = NewOnGpu<float>(queue, num_tensors);
  queue->Launch("gradcomp_sign_sgd_sum", num_blocks, &step);
  queue->Launch("gradcomp_sign_sgd_mean", num_tensors, &step);
  queue->Launch("gradcomp_sign_sgd_send", plan.num_slices, &step);
  return {step.body, step.not_finite};
}

void DecodeSignSgdOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                        const std::vector<float*>& values, bool adds, GpuQueue* queue) {
  DecodeFixed("gradcomp_sign_sgd_decode", SignSgdPlan(codecs), decoder, values, adds, queue);
}

}  // namespace gradcomp
