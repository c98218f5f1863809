// The data that the host and the kernels of all methods with payloads of fixed length exchange.
// NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

struct FixedTensor {
  float* values;  // an encoder's residual, updated in place, or a decoder's output
  const void* gradient;
  int gradient_type;     // GradientType: float, half, bfloat16
  int sent_whole;
  long long size;        // elements
  long long first_slice;
  long long first_word;  // offset in the body of a payload
};

// The arguments of all encoding kernels of a method.
template <typename Tensor>
struct FixedEncodeStep {
  const Tensor* tensors;
  long long num_tensors;
  int* not_finite;  // 0 before the first launch
  int* body;        // the payload's body; 0 at first, and if not all sums are finite
};

template <typename Tensor>
struct FixedDecodeStep {
  const Tensor* tensors;
  long long num_tensors;
  const int* bodies;    // the beginning of the first payload's body
  long long row_words;  // from one payload to the next
  int num_payloads;
  int adds;             // whether to add to the values; otherwise they are overwritten
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_TABLES_H_
