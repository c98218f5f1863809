// The kernels of one device: compiled, loaded and checked when they are first asked for.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "driver.h"
#include "queue.h"

namespace gradcomp {

struct KernelsOnGpu {
  std::string device;        // its name; empty without a driver
  int capability = 0;        // 90: compute capability 9.0
  const Driver* driver = nullptr;
  CUcontext context = nullptr;  // the primary one, which is TensorFlow's, too
  std::map<std::string, CUfunction> functions;
  Status status;  // why the kernels are not used, if they are not

  // Does all the work with the first call for a device, and may then take some seconds. What it
  // returns stays as it is.
  static const KernelsOnGpu& Of(int ordinal);

  // Of the device that a stream is of.
  static const KernelsOnGpu& OfStream(CUstream stream);
};

// A queue on a stream of a device. Its memory is of the driver's, and freed, as the queue ends, when
// all its work is done.
class DriverQueue : public GpuQueue {
 public:
  DriverQueue(const KernelsOnGpu& kernels, CUstream stream) : kernels_(kernels), stream_(stream) {}
  ~DriverQueue() override;

  void* Allocate(int64_t bytes) override;
  void* Upload(const void* data, int64_t bytes) override;
  void Zero(void* data, int64_t bytes) override;
  Status status() const override { return status_; }
  const Driver& driver() const { return *kernels_.driver; }
  CUcontext context() const { return kernels_.context; }

  // Waits for all work, and copies to the host.
  void Download(const void* from, int64_t bytes, void* to);

 protected:
  void LaunchBlocks(const char* kernel, int64_t num_blocks, int num_threads,
                    const void* parameter) override;
  CUstream stream() const { return stream_; }
  bool Check(int error, const char* what);  // whether all is well so far
  void Fail(const Status& status);

 private:
  const KernelsOnGpu& kernels_;
  const CUstream stream_;
  Status status_;
  std::vector<CUdeviceptr> memory_;
};

}  // namespace gradcomp
