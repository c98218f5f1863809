#include "kernels_on_gpu.h"

#include <cstdlib>
#include <memory>
#include <mutex>

#include "kernel_names.h"
#include "self_check.h"
#include "tables.h"

namespace gradcomp {
namespace {

constexpr int kCapabilityMajor = 75;  // a CUdevice_attribute
constexpr int kCapabilityMinor = 76;
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING

#define GRADCOMP_NAME(kernel) #kernel,
constexpr const char* kKernels[] = {GRADCOMP_ALL_KERNELS(GRADCOMP_NAME)};

bool IsSwitchedOff() {
  const char* value = std::getenv("GRADCOMP_GPU");
  return value && std::string(value) == "0";
}

Status Describe(CUdevice device, KernelsOnGpu* kernels) {
  const Driver& driver = *kernels->driver;
  char name[256] = "";
  Status status = driver.Check(driver.cuDeviceGetName(name, sizeof name, device), "cuDeviceGetName");
  if (!status.ok()) return status;
  kernels->device = name;
  int major = 0;
  int minor = 0;
  status = driver.Check(driver.cuDeviceGetAttribute(&major, kCapabilityMajor, device),
                        "cuDeviceGetAttribute");
  if (!status.ok()) return status;
  status = driver.Check(driver.cuDeviceGetAttribute(&minor, kCapabilityMinor, device),
                        "cuDeviceGetAttribute");
  kernels->capability = 10 * major + minor;
  return status;
}

Status LoadAndCheck(KernelsOnGpu* kernels) {
  const Driver& driver = *kernels->driver;
  std::vector<char> cubin;
  Status status = CompileKernels(kernels->capability, &cubin);
  if (!status.ok()) return status;
  CUmodule module;
  status = driver.Check(driver.cuModuleLoadData(&module, cubin.data()), "cuModuleLoadData");
  for (const char* name : kKernels) {
    if (!status.ok()) return status;
    status = driver.Check(driver.cuModuleGetFunction(&kernels->functions[name], module, name),
                          "cuModuleGetFunction");
  }
  if (!status.ok()) return status;
  CUstream stream;
  status = driver.Check(driver.cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
  if (!status.ok()) return status;
  {
    DriverQueue queue(*kernels, stream);
    status = CheckAgainstCpu(&queue);
  }
  driver.cuStreamDestroy(stream);
  return status;
}

Status Prepare(int ordinal, KernelsOnGpu* kernels) {
  if (IsSwitchedOff()) return {"they are switched off by GRADCOMP_GPU=0"};
  Status status;
  kernels->driver = Driver::Get(&status);
  if (!status.ok()) return status;
  const Driver& driver = *kernels->driver;
  CUdevice device;
  status = driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  if (!status.ok()) return status;
  status = Describe(device, kernels);
  if (!status.ok()) return status;
  status = driver.Check(driver.cuDevicePrimaryCtxRetain(&kernels->context, device),
                        "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  const CurrentContext current(driver, kernels->context);
  return LoadAndCheck(kernels);
}

// Creates an object for each reason, because callers keep references, and a later failure may have
// another reason.
const KernelsOnGpu& Unusable(const Status& status) {
  static std::mutex mutex;
  static auto* const reasons = new std::map<std::string, KernelsOnGpu>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [reason, is_new] = reasons->try_emplace(status.message);
  if (is_new) reason->second.status = status;
  return reason->second;
}

}  // namespace

const KernelsOnGpu& KernelsOnGpu::Of(int ordinal) {
  static std::mutex mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<KernelsOnGpu>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<KernelsOnGpu>& kernels = (*devices)[ordinal];
  if (!kernels) {
    kernels = std::make_unique<KernelsOnGpu>();
    kernels->status = Prepare(ordinal, kernels.get());
  }
  return *kernels;
}

const KernelsOnGpu& KernelsOnGpu::OfStream(CUstream stream) {
  Status status;
  const Driver* driver = Driver::Get(&status);
  if (!status.ok()) return Unusable(status);
  CUcontext context;
  status = driver->Check(driver->cuStreamGetCtx(stream, &context), "cuStreamGetCtx");
  if (!status.ok()) return Unusable(status);
  CUdevice device;
  {
    const CurrentContext current(*driver, context);
    status = driver->Check(driver->cuCtxGetDevice(&device), "cuCtxGetDevice");
  }
  return status.ok() ? Of(device) : Unusable(status);
}

DriverQueue::~DriverQueue() {
  if (memory_.empty()) return;
  driver().cuStreamSynchronize(stream_);
  for (CUdeviceptr memory : memory_) driver().cuMemFree(memory);
}

bool DriverQueue::Check(int error, const char* what) {
  Fail(driver().Check(error, what));
  return status_.ok();
}

void DriverQueue::Fail(const Status& status) {
  if (status_.ok()) status_ = status;
}

void* DriverQueue::Allocate(int64_t bytes) {
  CUdeviceptr memory = 0;
  if (bytes == 0 || !status_.ok()) return nullptr;
  if (!Check(driver().cuMemAlloc(&memory, bytes), "cuMemAlloc")) return nullptr;
  memory_.push_back(memory);
  return reinterpret_cast<void*>(memory);
}

void* DriverQueue::Upload(const void* data, int64_t bytes) {
  void* to = Allocate(bytes);
  if (!to) return nullptr;
  Check(driver().cuMemcpyHtoDAsync(ToCuda(to), data, bytes, stream_), "cuMemcpyHtoDAsync");
  Check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");  // data may be gone then
  return to;
}

void DriverQueue::Zero(void* data, int64_t bytes) {
  if (bytes == 0 || !status_.ok()) return;
  Check(driver().cuMemsetD8Async(ToCuda(data), 0, bytes, stream_), "cuMemsetD8Async");
}

void DriverQueue::LaunchBlocks(const char* kernel, int64_t num_blocks, int num_threads,
                               const void* parameter) {
  if (!status_.ok()) return;
  void* parameters[] = {const_cast<void*>(parameter)};
  Check(driver().cuLaunchKernel(kernels_.functions.at(kernel), static_cast<unsigned>(num_blocks), 1,
                                1, num_threads, 1, 1, 0, stream_, parameters, nullptr),
        kernel);
}

void DriverQueue::Download(const void* from, int64_t bytes, void* to) {
  if (bytes == 0 || !status_.ok()) return;
  Check(driver().cuMemcpyDtoHAsync(to, ToCuda(from), bytes, stream_), "cuMemcpyDtoHAsync");
  Check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

}  // namespace gradcomp
