// What the host tells QSGD's kernels, and what they tell each other. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_TABLES_H_

#include "fixed_tables.h"

namespace gradcomp::gpu {

constexpr int kScaleWords = 2;  // of a bucket, in front of its levels

// A piece is the buckets that a CUDA block measures.
struct QsgdTensor : FixedTensor {
  long long bucket_size;  // elements; of a tensor sent whole: those whose finiteness is found out together
  int width;              // how many threads measure a bucket together: those of a warp or of a block
  int bits;               // of a level
  long long first_bucket;
  long long first_piece;
};

// What the levels of a bucket stand for: minimum + unit * level.
struct QsgdScale {
  float minimum;
  float unit;
};

// One launch of each encoding kernel.
struct QsgdEncodeStep : FixedEncodeStep<QsgdTensor> {
  QsgdScale* scales;  // of each bucket
  int stochastic;     // otherwise values are rounded to the nearest level
  unsigned long long seed;
  unsigned long long replica;
  unsigned long long step;
};

using QsgdDecodeStep = FixedDecodeStep<QsgdTensor>;

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_QSGD_TABLES_H_
