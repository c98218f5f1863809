// What the host tells SignSGD's kernels, and what they tell each other. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_TABLES_H_

#include "fixed_tables.h"

namespace gradcomp::gpu {

// Magnitudes are added in the order of kernels/sign_sgd_codec.h: in blocks of these, in lanes.
constexpr int kSignSgdBlock = 1 << 16;
constexpr int kSignSgdLanes = 8;

struct SignSgdTensor : FixedTensor {
  long long num_blocks;
  long long first_block;
};

// One launch of each encoding kernel.
struct SignSgdEncodeStep : FixedEncodeStep<SignSgdTensor> {
  double* block_sums;  // of magnitudes
  float* means;        // of each tensor
};

using SignSgdDecodeStep = FixedDecodeStep<SignSgdTensor>;

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_TABLES_H_
