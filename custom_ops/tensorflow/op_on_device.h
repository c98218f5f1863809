// Ops as classes of work, on the host and on a GPU. Where the GPU kernels cannot be used, an op works on
// the host. A class of work has a Step, which may lock variables, and
//
//   absl::Status ReadAttributes(OpKernelConstruction* context);
//   absl::Status Read(OpKernelContext* context, Step* step) const;    // inputs
//   absl::Status OnHost(OpKernelContext* context, Step* step) const;  // the work
#pragma once

#include <memory>
#include <utility>

#include "gpu_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

using DoneCallback = AsyncOpKernel::DoneCallback;

template <typename Kernel, typename Work>
class OpOfWork : public Kernel {
 public:
  explicit OpOfWork(OpKernelConstruction* context) : Kernel(context) {
    OP_REQUIRES_OK(context, work_.ReadAttributes(context));
  }

 protected:
  // Reads the step and passes it to the GPU by give(queue). Without usable kernels, does the step on
  // the host and sets *on_host.
  template <typename Give>
  absl::Status Start(OpKernelContext* context, typename Work::Step* step, bool* on_host,
                     const Give& give) const {
    TF_RETURN_IF_ERROR(work_.Read(context, step));
    const KernelsOnGpu* kernels = UsableKernels(context);
    *on_host = kernels == nullptr;
    if (!kernels) return work_.OnHost(context, step);
    const CurrentContext current(*kernels->driver, kernels->context);
    const auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    return give(queue.get());
  }

  Work work_;
};

template <typename Work>
class OpOnHost : public OpOfWork<OpKernel, Work> {
 public:
  using OpOfWork<OpKernel, Work>::OpOfWork;

  void Compute(OpKernelContext* context) override {
    typename Work::Step step;
    OP_REQUIRES_OK(context, this->work_.Read(context, &step));
    OP_REQUIRES_OK(context, this->work_.OnHost(context, &step));
  }
};

// An op that waits for nothing. Its work has
//
//   absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const;
template <typename Work>
class OpOnGpu : public OpOfWork<OpKernel, Work> {
 public:
  using OpOfWork<OpKernel, Work>::OpOfWork;

  void Compute(OpKernelContext* context) override {
    typename Work::Step step;
    bool on_host = false;
    OP_REQUIRES_OK(context, this->Start(context, &step, &on_host, [&](TensorFlowQueue* queue) {
      TF_RETURN_IF_ERROR(this->work_.OnGpu(context, &step, queue));
      return queue->KeepUntilDone();
    }));
  }
};

// An op whose outputs are on the host. Its work has
//
//   absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
//                      const DoneCallback& done) const;
//
// OnGpu unlocks the step's variables once it has queued all their readers, and ends with
// TensorFlowQueue::Finish or Continue. If it returns an error, it has called neither.
template <typename Work>
class AsyncOpOnGpu : public OpOfWork<AsyncOpKernel, Work> {
 public:
  using OpOfWork<AsyncOpKernel, Work>::OpOfWork;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto step = std::make_shared<typename Work::Step>();
    bool on_host = false;
    OP_REQUIRES_OK_ASYNC(
        context,
        this->Start(context, step.get(), &on_host,
                    [&](TensorFlowQueue* queue) {
                      return this->work_.OnGpu(context, std::move(step), queue, done);
                    }),
        done);
    if (!on_host) return;
    step.reset();  // unlocks variables before the next op runs
    done();
  }
};

}  // namespace gradcomp
