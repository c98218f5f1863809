// Gives top-k's work to a queue. What the kernels do: top_k.cu.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_ON_GPU_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_ON_GPU_H_

#include <cstdint>
#include <vector>

#include "../kernels/fixed_length.h"
#include "queue.h"

namespace gradcomp {

// A payload behind its header, in the memory of the device, once the queue has done its work.
struct EncodedFixedOnGpu {
  const int32_t* body;    // zeros if not all is finite; null if it has no words
  const int* not_finite;  // 0 if all sums are finite; null if there are none
};

// These do what the functions of kernels/fixed_length.h do, with codecs that are TopKCodec or WholeCodec,
// and residuals, gradients and values whose pointers are the device's.
EncodedFixedOnGpu EncodeTopKOnGpu(const Codecs& codecs, const std::vector<Source>& sources,
                                  GpuQueue* queue);

// Of a decoder whose sums are known to be finite.
void ReduceTopKOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                     const std::vector<float*>& outputs, GpuQueue* queue);

void AddTopKOnGpu(const Codecs& codecs, const FixedLengthDecoder& decoder,
                  const std::vector<float*>& values, GpuQueue* queue);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_ON_GPU_H_
