// The data that the host and SignSGD's kernels exchange. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_TABLES_H_

#include "fixed_tables.h"

namespace gradcomp::gpu {

// The order of additions is that of kernels/sign_sgd_codec.h: the lanes of blocks of this size.
constexpr int kSignSgdBlock = 1 << 16;
constexpr int kSignSgdLanes = 8;

struct SignSgdTensor : FixedTensor {
  long long num_blocks;
  long long first_block;
};

// The arguments of the encoding kernels.
struct SignSgdEncodeStep : FixedEncodeStep<SignSgdTensor> {
  double* block_sums;  // of magnitudes
  float* means; // for each tensor
};

using SignSgdDecodeStep = FixedDecodeStep<SignSgdTensor>;

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_SIGN_SGD_TABLES_H_
