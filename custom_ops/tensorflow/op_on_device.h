// Templates of ops that run on the host or on a GPU. If the GPU kernels cannot be used, an op does
// its work on the host. An op is defined by a class with a type Step, which may lock variables, and
// with the functions
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
  // Reads the step and submits it to the GPU by give(queue). Without usable kernels, runs the step
  // on the host and sets *on_host.
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

// An op that waits for nothing. Its class also has
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

// An op whose outputs are on the host. Its class also has
//
//   absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
//                      const DoneCallback& done) const;
//
// OnGpu unlocks the step's variables once all work that reads them is queued, and ends with
// TensorFlowQueue::Finish or Continue. OnGpu calls neither if it returns an error.
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
