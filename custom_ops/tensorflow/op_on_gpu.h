// An op that gives its work to a GPU. Where the kernels cannot be used, the op works on the host.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_ON_GPU_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_ON_GPU_H_

#include <memory>
#include <utility>

#include "gpu_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

using DoneCallback = tensorflow::AsyncOpKernel::DoneCallback;

// An op that waits for nothing. Work derives from the Inputs of OpOnHost and adds
//
//   absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const;
template <typename Work>
class OpOnGpu : public tensorflow::OpKernel {
 public:
  explicit OpOnGpu(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, work_.ReadAttributes(context));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    typename Work::Step step;
    OP_REQUIRES_OK(context, work_.Read(context, &step));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, work_.OnHost(context, &step));
      return;
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK(context, work_.OnGpu(context, &step, queue.get()));
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }

 private:
  Work work_;
};

// An op whose outputs are on the host. Work derives from the Inputs of OpOnHost and adds
//
//   absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
//                      const DoneCallback& done) const;
//
// OnGpu unlocks the step's variables once it has queued all that reads them, and ends with
// TensorFlowQueue::Finish or Continue. If it returns an error, it has called neither.
template <typename Work>
class AsyncOpOnGpu : public tensorflow::AsyncOpKernel {
 public:
  explicit AsyncOpOnGpu(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, work_.ReadAttributes(context));
  }

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    auto step = std::make_shared<typename Work::Step>();
    OP_REQUIRES_OK_ASYNC(context, work_.Read(context, step.get()), done);
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK_ASYNC(context, work_.OnHost(context, step.get()), done);
      step.reset();  // unlocks variables before the next op runs
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK_ASYNC(context, work_.OnGpu(context, std::move(step), queue.get(), done), done);
  }

 private:
  Work work_;
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_OP_ON_GPU_H_
