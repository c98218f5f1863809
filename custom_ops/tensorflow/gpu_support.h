// Helpers of the ops' kernels on GPUs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../gpu/kernels_on_gpu.h"
#include "op_support.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// Returns the checked kernels of an op's device. Null if the kernels can't be used; the reason is
// logged once, and the op does its work on the host.
const KernelsOnGpu* UsableKernels(OpKernelContext* context);

// A queue on TensorFlow's stream, with TensorFlow's memory. The object and its memory live until
// its work is done and a callback has run.
class TensorFlowQueue : public DriverQueue, public std::enable_shared_from_this<TensorFlowQueue> {
 public:
  TensorFlowQueue(const KernelsOnGpu& kernels, OpKernelContext* context);

  void* Allocate(int64_t bytes) override;
  void* Upload(const void* data, int64_t bytes) override;

  // Allocates host memory that the device can write.
  void* AllocateOnHost(int64_t bytes);

  void CopyToHost(const void* from, int64_t bytes, void* to);

  // Copies a flag to the host; a null flag counts as 0. Returns null if no memory is left.
  int* FlagToHost(const int* flag);

  void CopyOnGpu(const void* from, int64_t bytes, void* to);

  // Must be called before the first write to variables.
  absl::Status Unshare(LockedResiduals* variables);

  // Runs `work` on a TensorFlow thread once all earlier work is done; `work` calls `done`. After an
  // error, `work` does not run: the op fails, and this function calls `done`.
  void Continue(const AsyncOpKernel::DoneCallback& done, std::function<void()> work);

  // Like Continue, but calls `done` after `work`.
  void Finish(const AsyncOpKernel::DoneCallback& done, std::function<void()> work);

  // Keeps all memory until the work is done; for an op that waits for nothing.
  absl::Status KeepUntilDone();

  absl::Status ToTensorFlow() const;

 private:
  void* AllocateWith(AllocatorAttributes attributes, int64_t bytes);

  // Runs `work` on a TensorFlow thread once all earlier work is done; returns false if `work` will
  // not run.
  bool Then(std::function<void()> work);

  OpKernelContext* const context_;
  tensorflow::thread::ThreadPool* const threads_;
  std::vector<Tensor> memory_;
};

}  // namespace gradcomp
