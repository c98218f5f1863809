// A queue whose device is the emulator; include this file after the kernels.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../gpu/kernel_names.h"
#include "../gpu/queue.h"
#include "check.h"

namespace gradcomp {

using EmulatedKernels = std::map<std::string, std::function<void(const void* parameter)>>;

// An entry for each name of gpu/kernel_names.h.
#define EMULATED(kernel) {#kernel, Emulated(gpu::kernel)},

template <typename Parameter>
std::function<void(const void*)> Emulated(void (*kernel)(Parameter)) {
  return [kernel](const void* bytes) {
    Parameter parameter;
    std::memcpy(&parameter, bytes, sizeof parameter);
    kernel(parameter);
  };
}

class EmulatedQueue : public GpuQueue {
 public:
  EmulatedQueue(const EmulatedKernels& kernels, unsigned seed) : kernels_(kernels), seed_(seed) {}

  // Returns memory with arbitrary contents, and bounds that the address sanitizer checks.
  void* Allocate(int64_t bytes) override {
    memory_.emplace_back(new char[bytes]);
    std::memset(memory_.back().get(), 0xcd, bytes);
    return memory_.back().get();
  }

  void* Upload(const void* data, int64_t bytes) override {
    void* to = Allocate(bytes);
    if (bytes > 0) std::memcpy(to, data, bytes);
    return to;
  }

  void Zero(void* data, int64_t bytes) override {
    if (bytes > 0) std::memset(data, 0, bytes);
  }

  Status status() const override { return {}; }

 protected:
  void LaunchBlocks(const char* kernel, int64_t num_blocks, int num_threads,
                    const void* parameter) override {
    const auto found = kernels_.find(kernel);
    CHECK(found != kernels_.end());
    CHECK(num_blocks > 0);
    gpu_emulator::Launch(num_blocks, num_threads, seed_++, [&] { found->second(parameter); });
  }

 private:
  const EmulatedKernels& kernels_;
  unsigned seed_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

}  // namespace gradcomp
