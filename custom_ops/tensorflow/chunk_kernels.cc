// The chunk ops on CPUs and GPUs. Only offsets, and one value of each chunk, are copied between a
// GPU and the host.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "../gpu/chunks_on_gpu.h"
#include "../kernels/chunks.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

// The first inputs are residuals, gradients and chunk sizes. The op's own inputs follow.
class ChunkInputs {
 public:
  // The layout and the variables of an op. The variables are locked during the lifetime of this
  // object.
  struct Work {
    LockedResiduals residuals;
    std::unique_ptr<ChunkLayout> layout;
  };

  absl::Status ReadAttributes(OpKernelConstruction* context, int num_own_inputs) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    return CheckOneGradientEach(context, num_tensors_, 1 + num_own_inputs);
  }

  absl::Status Begin(OpKernelContext* context, Work* work) const {
    std::vector<int64_t> chunk_sizes;
    TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_, "chunk_sizes", &chunk_sizes));
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckChunks(chunk_sizes, num_tensors_)));
    TF_RETURN_IF_ERROR(work->residuals.Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, work->residuals, num_tensors_));
    work->layout = std::make_unique<ChunkLayout>(work->residuals.all_sizes(), chunk_sizes);
    return absl::OkStatus();
  }

  absl::Status GetFlag(OpKernelContext* context, int i, const char* name, bool* flag) const {
    return GetScalar(context, own_index(i), name, flag);
  }

  // Reads and checks the op's first own input.
  absl::Status GetOffsets(OpKernelContext* context, const Work& work,
                          const int32_t** offsets) const {
    const Tensor& tensor = own_input(context, 0);
    if (tensor.NumElements() != work.layout->num_words()) {
      return InvalidArgument("offsets have ", tensor.NumElements(), " words; expected ",
                             work.layout->num_words(), ": the offsets of the same tensors and chunks");
    }
    *offsets = tensor.flat<int32_t>().data();
    return ToTensorFlow(CheckOffsets(*work.layout, *offsets));
  }

  int own_index(int i) const { return 2 * num_tensors_ + 1 + i; }
  const Tensor& own_input(OpKernelContext* context, int i) const {
    return context->input(own_index(i));
  }
  int num_tensors() const { return num_tensors_; }

 private:
  int num_tensors_;
};

class ChunkSelectWork : public ChunkInputs {
 public:
  struct Step {
    Work work;
    bool lead = false;
    int32_t* offsets = nullptr;  // the outputs
    bool* finite = nullptr;
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return ChunkInputs::ReadAttributes(context, 1);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(GetFlag(context, 0, "lead", &step->lead));
    TF_RETURN_IF_ERROR(Begin(context, &step->work));
    Tensor* offsets;
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, step->work.layout->num_words(), &offsets));
    if (!step->lead) offsets->flat<int32_t>().setZero();
    step->offsets = offsets->flat<int32_t>().data();
    return AllocateFlag(context, 1, &step->finite);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(
        host.Sources(&step->work.residuals, num_tensors(), /*writes=*/false, &sources));
    *step->finite = SelectLargest(*step->work.layout, sources, ThreadPool(context),
                                  step->lead ? step->offsets : nullptr);
    return host.Finish();
  }

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

class ChunkTakeWork : public ChunkInputs {
 public:
  struct Step {
    Work work;
    const int32_t* offsets = nullptr;
    float* values = nullptr;  // the output; the flag after it is already written
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return ChunkInputs::ReadAttributes(context, 2);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    bool finite = false;
    TF_RETURN_IF_ERROR(GetFlag(context, 1, "finite", &finite));
    TF_RETURN_IF_ERROR(Begin(context, &step->work));
    TF_RETURN_IF_ERROR(GetOffsets(context, step->work, &step->offsets));
    const int64_t count = step->work.layout->num_chunks();
    Tensor* values;
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, count + 1, &values));
    step->values = values->flat<float>().data();
    step->values[count] = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(
        host.Sources(&step->work.residuals, num_tensors(), /*writes=*/false, &sources));
    TakeChosen(*step->work.layout, sources, step->offsets, ThreadPool(context), step->values);
    return host.Finish();
  }

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

class ChunkApplyWork : public ChunkInputs {
 public:
  struct Step {
    Work work;
    const int32_t* offsets = nullptr;
    const float* totals = nullptr;
    const float* rests = nullptr;  // null without rests
    bool local_finite = false;
    bool finite = false;  // including the totals
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("filter", &filter_));
    return ChunkInputs::ReadAttributes(context, 5);
  }

  // Also writes the output `all_finite`.
  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(GetFlag(context, 2, "local_finite", &step->local_finite));
    TF_RETURN_IF_ERROR(GetFlag(context, 3, "finite", &step->finite));
    TF_RETURN_IF_ERROR(Begin(context, &step->work));
    TF_RETURN_IF_ERROR(GetOffsets(context, step->work, &step->offsets));
    const Tensor& totals = own_input(context, 1);
    const int64_t count = step->work.layout->num_chunks() + 1;
    if (totals.NumElements() != count) {
      return InvalidArgument("totals have ", totals.NumElements(), " elements; expected ", count,
                             ": one for each chunk, and the flag");
    }
    const Tensor& rests = own_input(context, 4);
    if (rests.NumElements() != 0 && rests.NumElements() != count - 1) {
      return InvalidArgument("rests have ", rests.NumElements(), " elements; expected ", count - 1,
                             ", one for each chunk, or none");
    }
    step->totals = totals.flat<float>().data();
    if (rests.NumElements() > 0) step->rests = rests.flat<float>().data();
    for (int64_t i = 0; i < count; ++i) step->finite &= std::isfinite(step->totals[i]);
    bool* all_finite;
    TF_RETURN_IF_ERROR(AllocateFlag(context, num_tensors(), &all_finite));
    *all_finite = step->finite;
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<float*> outputs(num_tensors());
    for (int i = 0; i < num_tensors(); ++i) {
      TF_RETURN_IF_ERROR(host.Output(i, step->work.residuals.shape(i), &outputs[i]));
    }
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(
        host.Sources(&step->work.residuals, num_tensors(), /*writes=*/true, &sources));
    if (step->finite) {
      ApplyTotals(*step->work.layout, sources, step->offsets, step->totals, step->rests, filter_,
                  ThreadPool(context), outputs);
      return host.Finish();
    }
    for (int i = 0; i < num_tensors(); ++i) {
      std::fill_n(outputs[i], step->work.residuals.shape(i).num_elements(), 0.0f);
    }
    if (step->local_finite) {
      KeepGradients(*step->work.layout, sources, filter_, ThreadPool(context));
    }
    return host.Finish();
  }

  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    LockedResiduals& residuals = step->work.residuals;
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(AllocateReduced(context, residuals, num_tensors(), &reduced));
    TF_RETURN_IF_ERROR(queue->Unshare(&residuals));
    const ChunkLayout& layout = *step->work.layout;
    const std::vector<Source> sources = SourcesOf(context, residuals, num_tensors());
    if (step->finite) {
      ApplyTotalsOnGpu(layout, sources, step->offsets, step->totals, step->rests, filter_, queue,
                       reduced);
      return absl::OkStatus();
    }
    for (int i = 0; i < num_tensors(); ++i) {
      queue->Zero(reduced[i], 4 * residuals.shape(i).num_elements());
    }
    if (step->local_finite) KeepGradientsOnGpu(layout, sources, filter_, queue);
    return absl::OkStatus();
  }

 private:
  float filter_;
};

#define ON_GPU(name)             \
  Name(name)                     \
      .Device(DEVICE_GPU)        \
      .HostMemory("residuals")   \
      .HostMemory("chunk_sizes")

REGISTER_KERNEL_BUILDER(
    ON_GPU("ChunkSelect").HostMemory("lead").HostMemory("offsets").HostMemory("finite"),
    AsyncOpOnGpu<ChunkSelectWork>);
REGISTER_KERNEL_BUILDER(
    ON_GPU("ChunkTake").HostMemory("offsets").HostMemory("finite").HostMemory("values"),
    AsyncOpOnGpu<ChunkTakeWork>);
REGISTER_KERNEL_BUILDER(ON_GPU("ChunkApply")
                            .HostMemory("offsets")
                            .HostMemory("totals")
                            .HostMemory("local_finite")
                            .HostMemory("finite")
                            .HostMemory("rests")
                            .HostMemory("all_finite"),
                        OpOnGpu<ChunkApplyWork>);

#undef ON_GPU

// This op and the next op read no values of tensors.
class ChunkDrawOp : public OpKernel {
 public:
  explicit ChunkDrawOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context, 1));
  }

  void Compute(OpKernelContext* context) override {
    ChunkInputs::Work work;
    OP_REQUIRES_OK(context, inputs_.Begin(context, &work));
    int64_t step = 0;
    OP_REQUIRES_OK(context, GetScalar(context, inputs_.own_index(0), "step", &step));
    Tensor* offsets;
    const TensorShape shape({work.layout->num_words()});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &offsets));
    DrawOffsets(*work.layout, step, offsets->flat<int32_t>().data());
  }

 private:
  ChunkInputs inputs_;
};

class ChunkSplitOp : public OpKernel {
 public:
  explicit ChunkSplitOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context, 0));
  }

  void Compute(OpKernelContext* context) override {
    ChunkInputs::Work work;
    OP_REQUIRES_OK(context, inputs_.Begin(context, &work));
    std::vector<int32_t> whole;
    std::vector<int32_t> coded;
    std::vector<int32_t> scale_of;
    std::vector<int64_t> counts;
    for (const ChunkLayout::Block& block : work.layout->blocks()) {
      const int64_t first = block.first_chunk;
      if (block.chunk_size == 1) {
        for (int64_t i = 0; i < block.num_chunks; ++i) whole.push_back(first + i);
        continue;
      }
      if (block.begin == 0) counts.push_back(0);
      counts.back() += block.num_chunks;
      for (int64_t i = 0; i < block.num_chunks; ++i) coded.push_back(first + i);
      scale_of.resize(coded.size(), counts.size() - 1);
    }
    OP_REQUIRES_OK(context, Output(context, 0, whole));
    OP_REQUIRES_OK(context, Output(context, 1, coded));
    OP_REQUIRES_OK(context, Output(context, 2, scale_of));
    OP_REQUIRES_OK(context, Output(context, 3, counts));
  }

 private:
  template <typename Value>
  static absl::Status Output(OpKernelContext* context, int i, const std::vector<Value>& values) {
    Tensor* output;
    const TensorShape shape({static_cast<int64_t>(values.size())});
    TF_RETURN_IF_ERROR(context->allocate_output(i, shape, &output));
    std::copy(values.begin(), values.end(), output->flat<Value>().data());
    return absl::OkStatus();
  }

  ChunkInputs inputs_;
};

REGISTER_KERNEL_BUILDER(Name("ChunkSelect").Device(DEVICE_CPU), OpOnHost<ChunkSelectWork>);
REGISTER_KERNEL_BUILDER(Name("ChunkDraw").Device(DEVICE_CPU), ChunkDrawOp);
REGISTER_KERNEL_BUILDER(Name("ChunkSplit").Device(DEVICE_CPU), ChunkSplitOp);
REGISTER_KERNEL_BUILDER(Name("ChunkTake").Device(DEVICE_CPU), OpOnHost<ChunkTakeWork>);
REGISTER_KERNEL_BUILDER(Name("ChunkApply").Device(DEVICE_CPU), OpOnHost<ChunkApplyWork>);

REGISTER_KERNEL_BUILDER(Name("ChunkDraw")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("chunk_sizes")
                            .HostMemory("step")
                            .HostMemory("offsets"),
                        ChunkDrawOp);
REGISTER_KERNEL_BUILDER(Name("ChunkSplit")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("chunk_sizes")
                            .HostMemory("whole")
                            .HostMemory("coded")
                            .HostMemory("scale_of")
                            .HostMemory("counts"),
                        ChunkSplitOp);

}  // namespace
}  // namespace gradcomp
