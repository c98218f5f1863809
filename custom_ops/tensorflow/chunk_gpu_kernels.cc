// The chunk ops on GPUs. What crosses to the host and back is offsets and one value of each chunk. Where
// the kernels can't be used, an op does its work on the host.
#include <memory>
#include <vector>

#include "../gpu/chunks_on_gpu.h"
#include "chunk_inputs.h"
#include "gpu_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;

class ChunkSelectGpuOp : public AsyncOpKernel {
 public:
  explicit ChunkSelectGpuOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    ChunkSelectInputs::Step step;
    OP_REQUIRES_OK_ASYNC(context, inputs_.Read(context, &step), done);
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK_ASYNC(context, inputs_.OnHost(context, &step), done);
      step.work.residuals.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    const ChunkLayout& layout = *step.work.layout;
    auto* not_finite = static_cast<int*>(queue->AllocateOnHost(sizeof(int)));
    const SelectedOnGpu selected = SelectLargestOnGpu(
        layout, SourcesOf(context, step.work.residuals, inputs_.num_tensors()), step.lead,
        queue.get());
    if (step.lead) queue->CopyToHost(selected.offsets, 4 * layout.num_words(), step.offsets);
    if (selected.not_finite) {
      queue->CopyToHost(selected.not_finite, sizeof(int), not_finite);
    } else if (not_finite) {
      *not_finite = 0;
    }
    // What comes behind on the stream sees the residuals as they are then.
    step.work.residuals.Unlock();
    queue->Finish(done, [not_finite, finite = step.finite] { *finite = *not_finite == 0; });
  }

 private:
  ChunkSelectInputs inputs_;
};

class ChunkTakeGpuOp : public AsyncOpKernel {
 public:
  explicit ChunkTakeGpuOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    ChunkTakeInputs::Step step;
    OP_REQUIRES_OK_ASYNC(context, inputs_.Read(context, &step), done);
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK_ASYNC(context, inputs_.OnHost(context, &step), done);
      step.work.residuals.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    const ChunkLayout& layout = *step.work.layout;
    const float* values = TakeChosenOnGpu(
        layout, SourcesOf(context, step.work.residuals, inputs_.num_tensors()), step.offsets,
        queue.get());
    queue->CopyToHost(values, 4 * layout.num_chunks(), step.values);
    step.work.residuals.Unlock();
    queue->Finish(done, [] {});
  }

 private:
  ChunkTakeInputs inputs_;
};

class ChunkApplyGpuOp : public OpKernel {
 public:
  explicit ChunkApplyGpuOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    ChunkApplyInputs::Step step;
    OP_REQUIRES_OK(context, inputs_.Read(context, &step));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, inputs_.OnHost(context, &step));
      return;
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK(context, Give(context, &step, queue.get()));
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }

 private:
  absl::Status Give(OpKernelContext* context, ChunkApplyInputs::Step* step,
                    TensorFlowQueue* queue) const {
    OpOutputList reduced;
    TF_RETURN_IF_ERROR(context->output_list("reduced", &reduced));
    std::vector<float*> outputs;
    for (int i = 0; i < inputs_.num_tensors(); ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(reduced.allocate(i, step->work.residuals.shape(i), &output));
      outputs.push_back(output->flat<float>().data());
    }
    TF_RETURN_IF_ERROR(queue->Unshare(&step->work.residuals));
    const ChunkLayout& layout = *step->work.layout;
    const std::vector<Source> sources =
        SourcesOf(context, step->work.residuals, inputs_.num_tensors());
    if (step->finite) {
      ApplyTotalsOnGpu(layout, sources, step->offsets, step->totals, step->rests,
                       inputs_.filter(), queue, outputs);
      return absl::OkStatus();
    }
    for (int i = 0; i < inputs_.num_tensors(); ++i) {
      queue->Zero(outputs[i], 4 * step->work.residuals.shape(i).num_elements());
    }
    if (step->own_finite) KeepGradientsOnGpu(layout, sources, inputs_.filter(), queue);
    return absl::OkStatus();
  }

  ChunkApplyInputs inputs_;
};

#define ON_GPU(name)             \
  Name(name)                     \
      .Device(DEVICE_GPU)        \
      .HostMemory("residuals")   \
      .HostMemory("chunk_sizes") \
      .HostMemory("groups")

REGISTER_KERNEL_BUILDER(
    ON_GPU("ChunkSelect").HostMemory("lead").HostMemory("offsets").HostMemory("finite"),
    ChunkSelectGpuOp);
REGISTER_KERNEL_BUILDER(
    ON_GPU("ChunkTake").HostMemory("offsets").HostMemory("finite").HostMemory("values"),
    ChunkTakeGpuOp);
REGISTER_KERNEL_BUILDER(ON_GPU("ChunkApply")
                            .HostMemory("offsets")
                            .HostMemory("totals")
                            .HostMemory("own_finite")
                            .HostMemory("finite")
                            .HostMemory("rests")
                            .HostMemory("all_finite"),
                        ChunkApplyGpuOp);

#undef ON_GPU

}  // namespace
}  // namespace gradcomp
