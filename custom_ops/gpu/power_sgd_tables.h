// The arguments of PowerSGD's kernels. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_POWER_SGD_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_POWER_SGD_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

constexpr int kRowLanes = 8;                        // threads that share a row
constexpr int kPieceRows = kThreads / kRowLanes;    // rows of a matrix that a CUDA block multiplies

// As gradcomp::PowerSgdTensor. P and Q begin in their vectors at left_begin and right_begin.
struct Matrix {
  float* residual;
  const void* gradient;
  float* output;      // for reduce
  int gradient_type;  // GradientType: float, half, bfloat16
  int too_large;      // for keep: the residual becomes zeros
  long long rows;
  long long columns;
  long long rank;     // 0: sent whole
  long long size;     // elements
  long long left_begin;
  long long right_begin;
  long long block_rows;
  long long block_columns;
  long long column_blocks;  // side by side
  long long row_blocks;     // below each other
  long long first_piece;    // of the multiplication by Q
  long long first_block;
  long long parts_begin;    // for the blocks' parts of Q
  long long first_slice;
};

// The arguments of the kernels of an op.
struct PowerSgdStep {
  const Matrix* matrices;
  long long num_matrices;
  long long right_size;
  const float* start;   // the factors, in the layout of Q
  float* left;          // P without the flag
  float* right;         // this replica's Q
  const float* total;   // the sum of Q
  float* parts;         // each block's part of Q
  int* not_finite;      // 0 before the first launch
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_POWER_SGD_TABLES_H_
