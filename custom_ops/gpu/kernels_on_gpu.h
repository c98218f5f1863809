// The kernels of a device, which are compiled, loaded and checked on first use.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "driver.h"
#include "queue.h"

namespace gradcomp {

struct KernelsOnGpu {
  std::string device;        // the device's name; empty without a driver
  int capability = 0;        // 90: compute capability 9.0
  const Driver* driver = nullptr;
  CUcontext context = nullptr;  // the primary context, which TensorFlow uses, too
  std::map<std::string, CUfunction> functions;
  Status status;  // the reason why the kernels are not used, if there is one

  // The first call for a device compiles and checks the kernels, which may take some seconds. The
  // returned object does not change afterwards.
  static const KernelsOnGpu& Of(int ordinal);

  // Returns the kernels of a stream's device.
  static const KernelsOnGpu& OfStream(CUstream stream);
};

// A queue on a stream of a device. It allocates the driver's memory, which is freed once the queue
// is destroyed and all its work is done.
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
  bool Check(int error, const char* what);  // whether no error has occurred so far
  void Fail(const Status& status);

 private:
  const KernelsOnGpu& kernels_;
  const CUstream stream_;
  Status status_;
  std::vector<CUdeviceptr> memory_;
};

}  // namespace gradcomp
