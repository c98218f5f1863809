#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "../kernels/chunks.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// Residuals, gradients, chunk sizes and groups are the first inputs; those of the op itself follow.
class ChunkOp : public OpKernel {
 public:
  ChunkOp(OpKernelConstruction* context, int num_own_inputs) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, 2 + num_own_inputs));
  }

 protected:
  // What an op works on, locked for as long as this lives.
  struct Work {
    LockedResiduals residuals;
    std::vector<Source> tensors;
    std::unique_ptr<ChunkLayout> layout;
  };

  absl::Status Begin(OpKernelContext* context, Work* work) const {
    std::vector<int64_t> chunk_sizes;
    std::vector<int64_t> groups;
    TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_, "chunk_sizes", &chunk_sizes));
    TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_ + 1, "groups", &groups));
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckChunks(chunk_sizes, groups, num_tensors_)));
    TF_RETURN_IF_ERROR(work->residuals.Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, work->residuals, num_tensors_));
    std::vector<int64_t> sizes;
    for (int i = 0; i < num_tensors_; ++i) {
      sizes.push_back(work->residuals.shape(i).num_elements());
    }
    work->layout = std::make_unique<ChunkLayout>(sizes, chunk_sizes, groups);
    return absl::OkStatus();
  }

  // Residuals may be shared as long as they are only read.
  void Point(OpKernelContext* context, Work* work) const {
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      work->tensors.push_back(
          {work->residuals.data(i), gradient.data(), ToGradientType(gradient.dtype())});
    }
  }

  absl::Status GetOffsets(OpKernelContext* context, const Work& work,
                          const int32_t** offsets) const {
    const Tensor& tensor = own_input(context, 0);
    if (tensor.NumElements() != work.layout->num_words()) {
      return InvalidArgument("offsets have ", tensor.NumElements(), " words; expected ",
                             work.layout->num_words(), ": those of the same tensors and chunks");
    }
    *offsets = tensor.flat<int32_t>().data();
    return ToTensorFlow(CheckOffsets(*work.layout, *offsets));
  }

  int own_index(int i) const { return 2 * num_tensors_ + 2 + i; }
  const Tensor& own_input(OpKernelContext* context, int i) const {
    return context->input(own_index(i));
  }

  absl::Status GetFlag(OpKernelContext* context, int i, const char* name, bool* flag) const {
    return GetScalar(context, own_index(i), name, flag);
  }

  int num_tensors_;
};

class ChunkSelectOp : public ChunkOp {
 public:
  explicit ChunkSelectOp(OpKernelConstruction* context) : ChunkOp(context, 1) {}

  void Compute(OpKernelContext* context) override {
    bool lead = false;
    OP_REQUIRES_OK(context, GetFlag(context, 0, "lead", &lead));
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    Point(context, &work);
    Tensor* offsets;
    const TensorShape shape({work.layout->num_words()});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &offsets));
    Tensor* finite;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &finite));
    auto words = offsets->flat<int32_t>();
    if (!lead) words.setZero();
    finite->scalar<bool>()() = SelectLargest(*work.layout, work.tensors, ThreadPool(context),
                                             lead ? words.data() : nullptr);
  }
};

class ChunkDrawOp : public ChunkOp {
 public:
  explicit ChunkDrawOp(OpKernelConstruction* context) : ChunkOp(context, 1) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
  }

  void Compute(OpKernelContext* context) override {
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    int64_t step = 0;
    OP_REQUIRES_OK(context, GetScalar(context, own_index(0), "step", &step));
    Tensor* offsets;
    const TensorShape shape({work.layout->num_words()});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &offsets));
    DrawOffsets(*work.layout, seed_, step, offsets->flat<int32_t>().data());
  }

 private:
  int64_t seed_;
};

class ChunkSplitOp : public ChunkOp {
 public:
  explicit ChunkSplitOp(OpKernelConstruction* context) : ChunkOp(context, 0) {}

  void Compute(OpKernelContext* context) override {
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    std::vector<int32_t> whole;
    std::vector<int32_t> coded;
    std::vector<int32_t> scale_of;
    std::vector<int64_t> counts;
    const ChunkLayout::Group* last = nullptr;
    for (const ChunkLayout::Block& block : work.layout->blocks()) {
      const int64_t first = block.group->first_chunk + block.first_chunk;
      if (block.group->chunk_size == 1) {
        for (int64_t i = 0; i < block.num_chunks; ++i) whole.push_back(first + i);
        continue;
      }
      if (block.group != last) counts.push_back(0);
      last = block.group;
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
};

class ChunkTakeOp : public ChunkOp {
 public:
  explicit ChunkTakeOp(OpKernelConstruction* context) : ChunkOp(context, 2) {}

  void Compute(OpKernelContext* context) override {
    bool finite = false;
    OP_REQUIRES_OK(context, GetFlag(context, 1, "finite", &finite));
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    Point(context, &work);
    const int32_t* offsets = nullptr;
    OP_REQUIRES_OK(context, GetOffsets(context, work, &offsets));
    const int64_t count = work.layout->num_chunks();
    Tensor* values;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count + 1}), &values));
    float* data = values->flat<float>().data();
    TakeChosen(*work.layout, work.tensors, offsets, ThreadPool(context), data);
    data[count] = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
};

class ChunkApplyOp : public ChunkOp {
 public:
  explicit ChunkApplyOp(OpKernelConstruction* context) : ChunkOp(context, 5) {
    OP_REQUIRES_OK(context, context->GetAttr("filter", &filter_));
  }

  void Compute(OpKernelContext* context) override {
    bool own_finite = false;
    bool finite = false;
    OP_REQUIRES_OK(context, GetFlag(context, 2, "own_finite", &own_finite));
    OP_REQUIRES_OK(context, GetFlag(context, 3, "finite", &finite));
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    const int32_t* offsets = nullptr;
    OP_REQUIRES_OK(context, GetOffsets(context, work, &offsets));
    const Tensor& totals = own_input(context, 1);
    const int64_t count = work.layout->num_chunks() + 1;
    OP_REQUIRES(context, totals.NumElements() == count,
                InvalidArgument("totals have ", totals.NumElements(), " elements; expected ",
                                count, ": one for each chunk, and the flag"));
    const Tensor& rests = own_input(context, 4);
    OP_REQUIRES(context, rests.NumElements() == 0 || rests.NumElements() == count - 1,
                InvalidArgument("rests have ", rests.NumElements(), " elements; expected ",
                                count - 1, ", one for each chunk, or none"));
    std::vector<float*> outputs;
    OP_REQUIRES_OK(context, Allocate(context, work, &outputs));
    OP_REQUIRES_OK(context, work.residuals.Unshare(context));
    Point(context, &work);

    const float* sums = totals.flat<float>().data();
    for (int64_t i = 0; i < count; ++i) finite = finite && std::isfinite(sums[i]);
    if (finite) {
      ApplyTotals(*work.layout, work.tensors, offsets, sums,
                  rests.NumElements() == 0 ? nullptr : rests.flat<float>().data(), filter_,
                  ThreadPool(context), outputs);
    } else {
      for (int i = 0; i < num_tensors_; ++i) {
        std::fill_n(outputs[i], work.residuals.shape(i).num_elements(), 0.0f);
      }
      if (own_finite) KeepGradients(*work.layout, work.tensors, filter_, ThreadPool(context));
    }
    Tensor* all_finite;
    OP_REQUIRES_OK(context, context->allocate_output(num_tensors_, TensorShape({}), &all_finite));
    all_finite->scalar<bool>()() = finite;
  }

 private:
  absl::Status Allocate(OpKernelContext* context, const Work& work,
                        std::vector<float*>* outputs) const {
    OpOutputList reduced;
    TF_RETURN_IF_ERROR(context->output_list("reduced", &reduced));
    for (int i = 0; i < num_tensors_; ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(reduced.allocate(i, work.residuals.shape(i), &output));
      outputs->push_back(output->flat<float>().data());
    }
    return absl::OkStatus();
  }

  float filter_;
};

REGISTER_KERNEL_BUILDER(Name("ChunkSelect").Device(DEVICE_CPU), ChunkSelectOp);
REGISTER_KERNEL_BUILDER(Name("ChunkDraw").Device(DEVICE_CPU), ChunkDrawOp);
REGISTER_KERNEL_BUILDER(Name("ChunkSplit").Device(DEVICE_CPU), ChunkSplitOp);
REGISTER_KERNEL_BUILDER(Name("ChunkTake").Device(DEVICE_CPU), ChunkTakeOp);
REGISTER_KERNEL_BUILDER(Name("ChunkApply").Device(DEVICE_CPU), ChunkApplyOp);

}  // namespace
}  // namespace gradcomp
