// PowerSGD's passes over residuals and gradients on a GPU, with the same bits as
// kernels/power_sgd.cc.
//
//   left:    left    a block for each piece of rows, or slice of a tensor that is sent whole
//   right:   right   a block for each of the CPU's: its part of Q, a thread for each column and rank
//            join    a thread for each element of Q: adds up the parts
//   reduce:  reduce  a block for each slice
//   keep:    keep    a block for each slice
#include "power_sgd_tables.h"
#include "device.h"

namespace gradcomp::gpu {

constexpr int kRanks = 4;  // sums per thread, at a time

__device__ inline float MatrixSum(const Matrix& matrix, long long i) {
  return __fadd_rn(matrix.residual[i], LoadGradient(matrix.gradient, matrix.gradient_type, i));
}

// Sums the values of the threads of a row in the CPU's order; the first thread gets the sum.
__device__ inline float RowSum(float value) {
  for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_down_sync(kAllLanes, value, distance));
  }
  return value;
}

// Adds the parts of P for a row and some ranks. Returns whether the row's elements are finite.
__device__ inline bool AddRow(const Matrix& matrix, const float* start, long long row,
                              long long first_rank, long long begin, long long end, float* sums) {
  bool finite = true;
  for (long long j = begin + threadIdx.x % kRowLanes; j < end; j += kRowLanes) {
    const float element = MatrixSum(matrix, row * matrix.columns + j);
    finite &= Magnitude(element) < kInfinity;
    for (int k = 0; k < kRanks; ++k) {
      if (first_rank + k >= matrix.rank) break;
      const float factor = start[(first_rank + k) * matrix.columns + j];
      sums[k] = __fadd_rn(sums[k], __fmul_rn(element, factor));
    }
  }
  return finite;
}

__device__ inline bool LeftOfRows(const PowerSgdStep& step, const Matrix& matrix, long long piece) {
  const long long row = piece * kPieceRows + threadIdx.x / kRowLanes;
  const float* start = step.start + matrix.right_begin;
  float* left = step.left + matrix.left_begin;
  bool finite = true;
  for (long long rank = 0; rank < matrix.rank; rank += kRanks) {
    float totals[kRanks];
    for (long long begin = 0; begin < matrix.columns; begin += matrix.block_columns) {
      const long long after = begin + matrix.block_columns;
      const long long end = after < matrix.columns ? after : matrix.columns;
      float sums[kRanks] = {};
      if (row < matrix.rows) finite &= AddRow(matrix, start, row, rank, begin, end, sums);
      for (int k = 0; k < kRanks; ++k) {
        const float part = RowSum(sums[k]);
        totals[k] = begin == 0 ? part : __fadd_rn(totals[k], part);
      }
    }
    if (threadIdx.x % kRowLanes != 0 || row >= matrix.rows) continue;
    for (int k = 0; k < kRanks && rank + k < matrix.rank; ++k) {
      left[(rank + k) * matrix.rows + row] = totals[k];
    }
  }
  return finite;
}

__device__ inline bool LeftOfWhole(const PowerSgdStep& step, const Matrix& matrix, long long piece) {
  const long long begin = piece * kSliceElements;
  bool finite = true;
  for (long long i = begin + threadIdx.x; i < begin + kSliceElements && i < matrix.size;
       i += kThreads) {
    const float element = MatrixSum(matrix, i);
    finite &= Magnitude(element) < kInfinity;
    step.left[matrix.left_begin + i] = element;
  }
  return finite;
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_power_sgd_left(PowerSgdStep step) {
  const long long number = LastUpTo(step.matrices, step.num_matrices, &Matrix::first_piece,
                                    static_cast<long long>(blockIdx.x));
  const Matrix& matrix = step.matrices[number];
  const long long piece = blockIdx.x - matrix.first_piece;
  const bool finite = matrix.rank == 0 ? LeftOfWhole(step, matrix, piece)
                                       : LeftOfRows(step, matrix, piece);
  if (!finite) atomicExch(step.not_finite, 1);
}

__device__ inline float* PartOf(const PowerSgdStep& step, const Matrix& matrix, long long block,
                                long long rank) {
  return step.parts + matrix.parts_begin + (block * matrix.rank + rank) * matrix.block_columns;
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_power_sgd_right(PowerSgdStep step) {
  const long long number = LastUpTo(step.matrices, step.num_matrices, &Matrix::first_block,
                                    static_cast<long long>(blockIdx.x));
  const Matrix& matrix = step.matrices[number];
  const long long block = blockIdx.x - matrix.first_block;
  const long long column = block % matrix.column_blocks * matrix.block_columns;
  const long long row = block / matrix.column_blocks * matrix.block_rows;
  const long long columns_left = matrix.columns - column;
  const long long width =
      columns_left < matrix.block_columns ? columns_left : matrix.block_columns;
  const long long end =
      row + matrix.block_rows < matrix.rows ? row + matrix.block_rows : matrix.rows;
  const float* left = step.left + matrix.left_begin;
  const long long groups = (matrix.rank + kRanks - 1) / kRanks;
  for (long long own = threadIdx.x; own < width * groups; own += kThreads) {
    const long long j = own % width;
    const long long rank = own / width * kRanks;
    float sums[kRanks] = {};
    for (long long i = row; i < end; ++i) {
      const float element = MatrixSum(matrix, i * matrix.columns + column + j);
      for (int k = 0; k < kRanks; ++k) {
        if (rank + k >= matrix.rank) break;
        sums[k] = __fadd_rn(sums[k], __fmul_rn(element, left[(rank + k) * matrix.rows + i]));
      }
    }
    for (int k = 0; k < kRanks && rank + k < matrix.rank; ++k) {
      PartOf(step, matrix, block, rank + k)[j] = sums[k];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_power_sgd_join(PowerSgdStep step) {
  const long long place = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= step.right_size) return;
  const Matrix& matrix =
      step.matrices[LastUpTo(step.matrices, step.num_matrices, &Matrix::right_begin, place)];
  const long long rank = (place - matrix.right_begin) / matrix.columns;
  const long long column = (place - matrix.right_begin) % matrix.columns;
  float sum = 0;
  for (long long i = 0; i < matrix.row_blocks; ++i) {
    const long long block = i * matrix.column_blocks + column / matrix.block_columns;
    const float part = PartOf(step, matrix, block, rank)[column % matrix.block_columns];
    sum = i == 0 ? part : __fadd_rn(sum, part);
  }
  step.right[place] = sum;
}

// The applied gradient and the new residual.
struct Reduced {
  float product;
  float rest;
};

__device__ inline Reduced ReduceElement(const PowerSgdStep& step, const Matrix& matrix,
                                        long long row, long long column) {
  Reduced reduced = {0, MatrixSum(matrix, row * matrix.columns + column)};
  for (long long k = 0; k < matrix.rank; ++k) {
    const float left = step.left[matrix.left_begin + k * matrix.rows + row];
    const long long right = matrix.right_begin + k * matrix.columns + column;
    reduced.rest = __fsub_rn(reduced.rest, __fmul_rn(left, step.right[right]));
    reduced.product = __fadd_rn(reduced.product, __fmul_rn(left, step.total[right]));
  }
  return reduced;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_power_sgd_reduce(PowerSgdStep step) {
  const Slice slice = FindSlice(step.matrices, step.num_matrices, blockIdx.x);
  const Matrix& matrix = step.matrices[slice.tensor];
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    const Reduced reduced =
        matrix.rank == 0
            ? Reduced{step.left[matrix.left_begin + i], 0}
            : ReduceElement(step, matrix, i / matrix.columns, i % matrix.columns);
    matrix.output[i] = reduced.product;
    matrix.residual[i] = reduced.rest;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_power_sgd_keep(PowerSgdStep step) {
  const Slice slice = FindSlice(step.matrices, step.num_matrices, blockIdx.x);
  const Matrix& matrix = step.matrices[slice.tensor];
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    matrix.residual[i] = matrix.too_large ? 0 : MatrixSum(matrix, i);
  }
}

}  // namespace gradcomp::gpu
