// What the host tells the kernels of methods whose payloads have a fixed length, of all of them alike.
// NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

struct FixedTensor {
  float* values;  // the residual, updated in place; of a decoder, the output
  const void* gradient;
  int gradient_type;     // GradientType: float, half, bfloat16
  int sent_whole;
  long long size;        // elements
  long long first_slice;
  long long first_word;  // in the body of a payload
};

// What all encoding kernels of a method are given.
template <typename Tensor>
struct FixedEncodeStep {
  const Tensor* tensors;
  long long num_tensors;
  int* not_finite;  // 0 before the first launch
  int* body;        // of the payload; 0 before, and where not all is finite
};

template <typename Tensor>
struct FixedDecodeStep {
  const Tensor* tensors;
  long long num_tensors;
  const int* bodies;    // of all payloads; the first of these is that of the first
  long long row_words;  // from one to the next
  int num_payloads;
  int adds;             // whether to add to the values; otherwise they are overwritten
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_FIXED_TABLES_H_
