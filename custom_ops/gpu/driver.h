// CUDA's driver and its compiler NVRTC, loaded at run time, so that the build needs neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../kernels/common.h"

namespace gradcomp {

// These types are as in cuda.h.
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUhostFn = void (*)(void*);

// The driver's functions; their results are CUresult, 0 on success.
struct Driver {
  int (*cuInit)(unsigned flags);
  int (*cuGetErrorName)(int error, const char** name);
  int (*cuDeviceGet)(CUdevice* device, int ordinal);
  int (*cuDeviceGetName)(char* name, int size, CUdevice device);
  int (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  int (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  int (*cuCtxPushCurrent)(CUcontext context);
  int (*cuCtxPopCurrent)(CUcontext* context);
  int (*cuCtxGetDevice)(CUdevice* device);
  int (*cuModuleLoadData)(CUmodule* module, const void* image);
  int (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  int (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z,
                        unsigned shared_bytes, CUstream stream, void** parameters, void** extra);
  int (*cuLaunchHostFunc)(CUstream stream, CUhostFn function, void* data);
  int (*cuMemAlloc)(CUdeviceptr* memory, size_t bytes);
  int (*cuMemFree)(CUdeviceptr memory);
  int (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void* from, size_t bytes, CUstream stream);
  int (*cuMemcpyDtoHAsync)(void* to, CUdeviceptr from, size_t bytes, CUstream stream);
  int (*cuMemcpyDtoDAsync)(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
  int (*cuMemsetD8Async)(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream);
  int (*cuStreamCreate)(CUstream* stream, unsigned flags);
  int (*cuStreamDestroy)(CUstream stream);
  int (*cuStreamGetCtx)(CUstream stream, CUcontext* context);
  int (*cuStreamSynchronize)(CUstream stream);

  // Loads and initializes the driver on the first call. Null without a driver, with the reason in
  // *status.
  static const Driver* Get(Status* status);

  // Returns a function's error as one sentence.
  Status Check(int error, const char* what) const;
};

inline CUdeviceptr ToCuda(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

// Makes a context current during the lifetime of this object.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
    driver_.cuCtxPushCurrent(context);
  }
  ~CurrentContext() {
    CUcontext context;
    driver_.cuCtxPopCurrent(&context);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

// Sets the first path at which to look for NVRTC. Python calls this before the first kernel is
// compiled.
void SetNvrtcPath(const std::string& path);

// Compiles all kernels for a device; a `capability` of 90 means compute capability 9.0.
Status CompileKernels(int capability, std::vector<char>* cubin);

}  // namespace gradcomp
