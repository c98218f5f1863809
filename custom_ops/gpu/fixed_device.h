// What the kernels of methods whose payloads have a fixed length share.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_DEVICE_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_DEVICE_H_

#include "device.h"
#include "fixed_tables.h"

namespace gradcomp::gpu {

// Residual plus gradient.
__device__ inline float FixedSum(const FixedTensor& tensor, long long i) {
  return __fadd_rn(tensor.values[i], LoadGradient(tensor.gradient, tensor.gradient_type, i));
}

__device__ inline void SendWhole(const FixedTensor& tensor, const Slice& slice, int* words) {
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    words[i] = static_cast<int>(__float_as_uint(FixedSum(tensor, i)));
    tensor.values[i] = 0;
  }
}

// A word of a payload that is a float: of a tensor sent whole, what is said of an element.
struct FloatAt {
  __device__ float operator()(const int* words, long long i) const {
    return __uint_as_float(static_cast<unsigned>(words[i]));
  }
};

// Adds up what payloads say of each element, by value_of(words of the tensor, element).
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
