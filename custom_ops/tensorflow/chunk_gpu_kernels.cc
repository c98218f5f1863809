// The chunk ops on GPUs. What crosses to the host and back is offsets and one value of each chunk. Where
// the kernels can't be used, an op does its work on the host.
#include <memory>
#include <vector>

#include "../gpu/chunks_on_gpu.h"
#include "chunk_inputs.h"
#include "op_on_gpu.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernelContext;

class ChunkSelectOnGpu : public ChunkSelectInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    const ChunkLayout& layout = *step->work.layout;
    const SelectedOnGpu selected =
        SelectLargestOnGpu(layout, SourcesOf(context, step->work.residuals, num_tensors()),
                           step->lead, queue);
    if (step->lead) queue->CopyToHost(selected.offsets, 4 * layout.num_words(), step->offsets);
    const int* not_finite = queue->FlagToHost(selected.not_finite);
    step->work.residuals.Unlock();
    queue->Finish(done, [not_finite, finite = step->finite] { *finite = *not_finite == 0; });
    return absl::OkStatus();
  }
};

class ChunkTakeOnGpu : public ChunkTakeInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    const ChunkLayout& layout = *step->work.layout;
    const float* values =
        TakeChosenOnGpu(layout, SourcesOf(context, step->work.residuals, num_tensors()),
                        step->offsets, queue);
    queue->CopyToHost(values, 4 * layout.num_chunks(), step->values);
    step->work.residuals.Unlock();
    queue->Finish(done, [] {});
    return absl::OkStatus();
  }
};

class ChunkApplyOnGpu : public ChunkApplyInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    LockedResiduals& residuals = step->work.residuals;
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(AllocateReduced(context, residuals, num_tensors(), &reduced));
    TF_RETURN_IF_ERROR(queue->Unshare(&residuals));
    const ChunkLayout& layout = *step->work.layout;
    const std::vector<Source> sources = SourcesOf(context, residuals, num_tensors());
    if (step->finite) {
      ApplyTotalsOnGpu(layout, sources, step->offsets, step->totals, step->rests, filter(), queue,
                       reduced);
      return absl::OkStatus();
    }
    for (int i = 0; i < num_tensors(); ++i) {
      queue->Zero(reduced[i], 4 * residuals.shape(i).num_elements());
    }
    if (step->own_finite) KeepGradientsOnGpu(layout, sources, filter(), queue);
    return absl::OkStatus();
  }
};

#define ON_GPU(name)             \
  Name(name)                     \
      .Device(DEVICE_GPU)        \
      .HostMemory("residuals")   \
      .HostMemory("chunk_sizes") \
      .HostMemory("groups")

REGISTER_KERNEL_BUILDER(
    ON_GPU("ChunkSelect").HostMemory("lead").HostMemory("offsets").HostMemory("finite"),
    AsyncOpOnGpu<ChunkSelectOnGpu>);
REGISTER_KERNEL_BUILDER(
    ON_GPU("ChunkTake").HostMemory("offsets").HostMemory("finite").HostMemory("values"),
    AsyncOpOnGpu<ChunkTakeOnGpu>);
REGISTER_KERNEL_BUILDER(ON_GPU("ChunkApply")
                            .HostMemory("offsets")
                            .HostMemory("totals")
                            .HostMemory("own_finite")
                            .HostMemory("finite")
                            .HostMemory("rests")
                            .HostMemory("all_finite"),
                        OpOnGpu<ChunkApplyOnGpu>);

#undef ON_GPU

}  // namespace
}  // namespace gradcomp
