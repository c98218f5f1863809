#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/chunks.h"
#include "chunk_inputs.h"
#include "op_on_host.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// This one and the next read no value of a tensor.
class ChunkDrawOp : public OpKernel {
 public:
  explicit ChunkDrawOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context, 1));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
  }

  void Compute(OpKernelContext* context) override {
    ChunkInputs::Work work;
    OP_REQUIRES_OK(context, inputs_.Begin(context, &work));
    int64_t step = 0;
    OP_REQUIRES_OK(context, GetScalar(context, inputs_.own_index(0), "step", &step));
    Tensor* offsets;
    const TensorShape shape({work.layout->num_words()});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &offsets));
    DrawOffsets(*work.layout, seed_, step, offsets->flat<int32_t>().data());
  }

 private:
  ChunkInputs inputs_;
  int64_t seed_;
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

  ChunkInputs inputs_;
};

REGISTER_KERNEL_BUILDER(Name("ChunkSelect").Device(DEVICE_CPU), OpOnHost<ChunkSelectInputs>);
REGISTER_KERNEL_BUILDER(Name("ChunkDraw").Device(DEVICE_CPU), ChunkDrawOp);
REGISTER_KERNEL_BUILDER(Name("ChunkSplit").Device(DEVICE_CPU), ChunkSplitOp);
REGISTER_KERNEL_BUILDER(Name("ChunkTake").Device(DEVICE_CPU), OpOnHost<ChunkTakeInputs>);
REGISTER_KERNEL_BUILDER(Name("ChunkApply").Device(DEVICE_CPU), OpOnHost<ChunkApplyInputs>);

REGISTER_KERNEL_BUILDER(Name("ChunkDraw")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("chunk_sizes")
                            .HostMemory("groups")
                            .HostMemory("step")
                            .HostMemory("offsets"),
                        ChunkDrawOp);
REGISTER_KERNEL_BUILDER(Name("ChunkSplit")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("chunk_sizes")
                            .HostMemory("groups")
                            .HostMemory("whole")
                            .HostMemory("coded")
                            .HostMemory("scale_of")
                            .HostMemory("counts"),
                        ChunkSplitOp);

}  // namespace
}  // namespace gradcomp
