// What the kernels of ops share on GPUs.
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

// The kernels of the device that an op runs on, checked. Null if they can't be used: the user has been
// told why, once, and the op does its work on the host.
const KernelsOnGpu* UsableKernels(OpKernelContext* context);

// TensorFlow's stream and memory. Lives, with all that it has allocated, until its work is done and a
// callback has run.
class TensorFlowQueue : public DriverQueue, public std::enable_shared_from_this<TensorFlowQueue> {
 public:
  TensorFlowQueue(const KernelsOnGpu& kernels, OpKernelContext* context);

  void* Allocate(int64_t bytes) override;
  void* Upload(const void* data, int64_t bytes) override;

  // On the host, where the device can write.
  void* AllocateOnHost(int64_t bytes);

  void CopyToHost(const void* from, int64_t bytes, void* to);

  // Copies a flag to the host; a null flag counts as 0. Returns null where memory is out.
  int* FlagToHost(const int* flag);

  void CopyOnGpu(const void* from, int64_t bytes, void* to);

  // Before the first write to variables.
  absl::Status Unshare(LockedResiduals* variables);

  // Runs `work` on a thread of TensorFlow's once all work so far is done; `work` calls `done`. Where
  // that is not certain, `work` will not run: the op fails, and this calls `done`.
  void Continue(const AsyncOpKernel::DoneCallback& done, std::function<void()> work);

  // Runs `work` and then `done` once all work so far is done, as Continue does.
  void Finish(const AsyncOpKernel::DoneCallback& done, std::function<void()> work);

  // What an op returns that waits for nothing: all memory is kept as long as it is in use.
  absl::Status KeepUntilDone();

  absl::Status ToTensorFlow() const;

 private:
  void* AllocateWith(AllocatorAttributes attributes, int64_t bytes);

  // Runs `work` on a thread of TensorFlow's once all work so far is done; returns false where it will
  // not run.
  bool Then(std::function<void()> work);

  OpKernelContext* const context_;
  tensorflow::thread::ThreadPool* const threads_;
  std::vector<Tensor> memory_;
};

}  // namespace gradcomp
