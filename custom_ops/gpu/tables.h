// Definitions that the host and the kernels of all methods share. Plain C++ without includes,
// because NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_TABLES_H_

namespace gradcomp::gpu {

constexpr int kThreads = 512;          // per CUDA block, in most kernels
constexpr int kLanes = 32;             // threads per warp
constexpr int kWarps = kThreads / kLanes;
constexpr int kSliceElements = 4096;   // elements of a tensor that a CUDA block processes

// The numbers with which Adam updates the second moment of a gradient, and divides by its root.
struct Adam {
  float share;          // 1 - beta_2
  float decay;          // beta_2, at least 1/2
  float epsilon;
  float root_of_scale;  // of the second moment
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_TABLES_H_
