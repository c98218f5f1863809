// Functions of the library that tf_gradcomp/ops/library.py calls.
#include <string>

#include "../gpu/driver.h"
#include "../gpu/kernels_on_gpu.h"
#include "../kernels/scan_bins.h"

#ifndef TF_GRADCOMP_TENSORFLOW_VERSION
#error "define TF_GRADCOMP_TENSORFLOW_VERSION as the version of TensorFlow that is compiled against"
#endif

extern "C" {

// Python finds this text by its prefix in the file, because a library for another TensorFlow can't
// be opened.
extern const char tf_gradcomp_build_info[];
const char tf_gradcomp_build_info[] = "tf_gradcomp built for TensorFlow " TF_GRADCOMP_TENSORFLOW_VERSION;

const char* tf_gradcomp_simd() { return gradcomp::Name(gradcomp::BestSimd()); }

// Sets the path of NVRTC.
void tf_gradcomp_set_nvrtc(const char* path) { gradcomp::SetNvrtcPath(path); }

// Compiles the kernels for a compute capability, 90 for 9.0; returns an error, or "".
const char* tf_gradcomp_gpu_compile(int capability) {
  static thread_local std::string error;
  std::vector<char> cubin;
  error = gradcomp::CompileKernels(capability, &cubin).message;
  return error.c_str();
}

// These functions return a device's name, its compute capability, and the reason why its kernels
// are not used, or "". The first call compiles and checks the kernels.
const char* tf_gradcomp_gpu_name(int ordinal) {
  return gradcomp::KernelsOnGpu::Of(ordinal).device.c_str();
}
int tf_gradcomp_gpu_capability(int ordinal) {
  return gradcomp::KernelsOnGpu::Of(ordinal).capability;
}
const char* tf_gradcomp_gpu_error(int ordinal) {
  return gradcomp::KernelsOnGpu::Of(ordinal).status.message.c_str();
}

}
