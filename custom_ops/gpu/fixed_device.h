// Helpers of the GPU kernels of methods with payloads of fixed length.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_DEVICE_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_DEVICE_H_

#include "device.h"
#include "fixed_tables.h"

namespace gradcomp::gpu {

// Returns residual plus gradient.
__device__ inline float FixedSum(const FixedTensor& tensor, long long i) {
  return __fadd_rn(tensor.values[i], LoadGradient(tensor.gradient, tensor.gradient_type, i));
}

__device__ inline void SendWhole(const FixedTensor& tensor, const Slice& slice, int* words) {
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    words[i] = static_cast<int>(__float_as_uint(FixedSum(tensor, i)));
    tensor.values[i] = 0;
  }
}

// Reads a word of a payload as a float: an element of a tensor that is sent whole.
struct FloatAt {
  __device__ float operator()(const int* words, long long i) const {
    return __uint_as_float(static_cast<unsigned>(words[i]));
  }
};

// Sums the payloads' values of each element, which value_of(words of the tensor, element) returns.
template <typename Tensor, typename Value>
__device__ void DecodeElements(const FixedDecodeStep<Tensor>& step, const Slice& slice,
                               const Value& value_of) {
  const Tensor& tensor = step.tensors[slice.tensor];
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    float sum = step.adds ? tensor.values[i] : 0.0f;
    const int* words = step.bodies + tensor.first_word;
    for (int payload = 0; payload < step.num_payloads; ++payload, words += step.row_words) {
      sum = __fadd_rn(sum, value_of(words, i));
    }
    tensor.values[i] = sum;
  }
}

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_DEVICE_H_
