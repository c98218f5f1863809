// AdaComp's decoding on a GPU: what kernels/adacomp_decoder.cc does, to the bit, of spans that were
// checked. One launch, with a block for each block of the payload format.
#include "adacomp_device.h"

namespace gradcomp {
namespace gpu {

__device__ inline void DecodeWhole(const DecodeStep& step, const DecodeBlock& block) {
  for (unsigned i = threadIdx.x; i < block.size; i += kThreads) {
    float sum = step.adds ? block.values[i] : 0.0f;
    for (int payload = 0; payload < step.num_payloads; ++payload) {
      const DecodeSpan& span = step.spans[payload * step.num_blocks + blockIdx.x];
      if (span.codes) sum = __fadd_rn(sum, reinterpret_cast<const float*>(span.codes)[i]);
    }
    block.values[i] = sum;
  }
}

__device__ inline void DecodeCodes(const DecodeStep& step, const DecodeBlock& block) {
  if (!step.adds) {
    for (unsigned i = threadIdx.x; i < block.size; i += kThreads) block.values[i] = 0;
  }
  for (int payload = 0; payload < step.num_payloads; ++payload) {
    // The barriers of ForEachCode keep sums in the order of the payloads.
    const DecodeSpan& span = step.spans[payload * step.num_blocks + blockIdx.x];
    const unsigned scale_bits = __float_as_uint(span.scale);
    ForEachCode(span.codes, span.num_codes, block.code_bytes,
                [&](unsigned, unsigned code, unsigned bin) {
                  AddCode(code, block.code_bytes, scale_bits, block.values + bin * block.bin_size);
                });
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_decode(DecodeStep step) {
  const DecodeBlock& block = step.blocks[blockIdx.x];
  if (block.sent_whole) {
    DecodeWhole(step, block);
  } else {
    DecodeCodes(step, block);
  }
}

}  // namespace gpu
}  // namespace gradcomp
