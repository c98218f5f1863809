// The data that the host and QSGD's kernels exchange. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_TABLES_H_

#include "fixed_tables.h"

namespace gradcomp::gpu {

constexpr int kScaleWords = 2;  // of a bucket, before its levels

// A piece has the buckets that a CUDA block measures.
struct QsgdTensor : FixedTensor {
  long long bucket_size;  // elements; for a tensor sent whole, the unit of the check for finiteness
  int width;              // the number of threads that share a bucket: a warp or a block
  int bits;               // of a level
  long long first_bucket;
  long long first_piece;
};

// A level of a bucket represents the value minimum + unit * level.
struct QsgdScale {
  float minimum;
  float unit;
};

// The arguments of the encoding kernels.
struct QsgdEncodeStep : FixedEncodeStep<QsgdTensor> {
  QsgdScale* scales;  // for each bucket
  unsigned long long replica;
  unsigned long long step;
};

using QsgdDecodeStep = FixedDecodeStep<QsgdTensor>;

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_TABLES_H_
