// The interface between the host and a GPU: a stream of TensorFlow, a stream of the bare driver, or
// the emulator of the tests.
#pragma once

#include <cstdint>

#include "../kernels/common.h"
#include "tables.h"

namespace gradcomp {

// A queue of work on a GPU, done in the order of submission. No function waits for the work. After
// the first error, all functions fail.
class GpuQueue {
 public:
  virtual ~GpuQueue() = default;

  // Allocates device memory for the work that follows, aligned for any type; null after an error.
  // After the queue is destroyed, only work submitted before may write to the memory.
  virtual void* Allocate(int64_t bytes) = 0;

  // Copies data from the host now.
  virtual void* Upload(const void* data, int64_t bytes) = 0;

  virtual void Zero(void* data, int64_t bytes) = 0;

  // Runs a kernel, whose only parameter is a copy of `parameter`.
  void Launch(const char* kernel, int64_t num_blocks, const void* parameter,
              int num_threads = gpu::kThreads) {
    LaunchBlocks(kernel, num_blocks, num_threads, parameter);
  }

  virtual Status status() const = 0;

 protected:
  virtual void LaunchBlocks(const char* kernel, int64_t num_blocks, int num_threads,
                            const void* parameter) = 0;
};

// Typed versions of Allocate and Upload.
template <typename Value>
Value* NewOnGpu(GpuQueue* queue, int64_t size) {
  return static_cast<Value*>(queue->Allocate(size * int64_t{sizeof(Value)}));
}
template <typename Values>
auto* CopyToGpu(GpuQueue* queue, const Values& values) {
  using Value = typename Values::value_type;
  return static_cast<Value*>(queue->Upload(values.data(), values.size() * sizeof(Value)));
}

}  // namespace gradcomp
