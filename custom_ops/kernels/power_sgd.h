// PowerSGD: gradients as products of two thin matrices.
//
// A tensor is seen as a matrix M, residual plus gradient, whose columns are its last axis. It is
// sent as P Q^T, P being `rows` x `rank` and Q `columns` x `rank`. P and Q of all tensors lie in
// one vector each, transposed: column after column. A tensor of rank 0 is sent whole: itself in
// place of P.
//
// Partial sums are those of blocks, which depend on shapes alone, and are added in order: results
// don't depend on threads. What replicas compute from sums, which they all have, is equal to the
// bit on any processor.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "common.h"
#include "floats.h"

namespace gradcomp {

struct PowerSgdTensor {
  float* residual;
  const void* gradient;
  GradientType type;
  int64_t rows;
  int64_t columns;
  int64_t rank;            // 0: sent whole
  int64_t factor_columns;  // of the variable that the factor is in; at least `rank`

  int64_t size() const { return rows * columns; }
  int64_t left_size() const { return rank == 0 ? size() : rank * rows; }
  int64_t right_size() const { return rank * columns; }

  // Of a block, but for the last ones, where there is a rank.
  int64_t block_rows() const;
  int64_t block_columns() const;
};

// One sentence if there is not one rank for each tensor.
Status CheckRanks(const std::vector<int64_t>& ranks, int64_t num_tensors);

// One sentence on a rank that a tensor can't be sent with.
Status CheckRank(int64_t tensor, int64_t rank, int64_t rows, int64_t columns);

// Gram-Schmidt, in place, on columns one after another. One that depends on those before it becomes
// zero.
void OrthonormalizeColumns(int64_t rows, int64_t rank, float* columns);

// Whether the product of such columns with the transpose of orthonormal ones is finite.
bool CanMultiplyColumns(int64_t rows, int64_t rank, const float* columns);

// Copies the first `rank` columns of a factor, [rows, stride]. In place of a column of zeros, which
// would stay so for ever, come pseudo-random values.
void TakeColumns(const float* factor, int64_t rows, int64_t stride, int64_t rank,
                 std::mt19937* random, float* columns);

// The other way round: scales the columns to length 1. Those behind the rank become zeros.
void StoreColumns(const float* columns, int64_t rows, int64_t stride, int64_t rank, float* factor);

class PowerSgd {
 public:
  PowerSgd(const std::vector<PowerSgdTensor>& tensors, ParallelFor parallel_for);

  // Elements of the vectors of P and Q. In front of the former is a flag, 0 or NaN.
  int64_t left_size() const { return left_size_; }
  int64_t right_size() const { return right_size_; }

  // The factors as Q is: see TakeColumns. The random values are the same for one `step` on all
  // replicas.
  std::vector<float> Start(const std::vector<const float*>& factors, int64_t step) const;

  // P = M start. Returns whether all of M is finite; if not, the flag is NaN.
  bool ComputeLeft(const std::vector<float>& start, float* left) const;

  // Makes the columns of P orthonormal in place. One that depends on those before it becomes zero.
  // Returns whether all of `left` is finite; if not, nothing is done.
  bool Orthonormalize(float* left) const;

  // Q = M^T P. Returns whether all of M is finite, but for tensors that are sent whole.
  bool ComputeRight(const float* left, float* right) const;

  // Whether P Q^T is finite for any orthonormal P.
  bool CanMultiply(const float* right) const;

  // Puts a NaN into each Q for which it is not, which will be seen in the sum.
  void FlagProducts(float* right) const;

  // What a replica sends, or what all replicas do.
  struct Factors {
    const float* left;
    const float* right;
  };

  // reduced = P Q^T of the total, or what was summed whole; residual = M - P Q^T of the own factors,
  // or zeros. `reduced` may be where the gradient is.
  void Reduce(const Factors& own, const Factors& total, const std::vector<float*>& reduced) const;

  // The tensors whose sum of P is not finite, or its product with the sum of Q, though all replicas
  // are: those sums would be as large in the next step.
  std::vector<char> TooLarge(const float* left, const float* total) const;

  // residual = M; of tensors that are too large, zeros.
  void Keep(const std::vector<char>& too_large) const;

  // factor = total, its columns scaled to length 1: that changes no product, and whatever the scale
  // of gradients, P has it, too. Where a rank grows again, columns behind it begin anew.
  void StoreFactors(const float* total, const std::vector<float*>& factors) const;

 private:
  // A piece of a tensor that one thread works on.
  struct Block {
    int64_t tensor;
    int64_t row;
    int64_t column;
    int64_t rows;
    int64_t columns;
  };
  using Parts = std::vector<std::vector<float>>;  // of each block

  void AddBlocks(int64_t tensor);
  bool CanMultiply(int64_t tensor, const float* right) const;
  template <typename Work>
  void ForEachBlock(const Work& work) const;
  template <typename Work>
  bool ForEachTile(const Block& block, const Work& work) const;
  std::vector<float> PaddedRight(const Block& block, const float* right) const;
  void ReduceBlock(const Block& block, const Factors& own, const Factors& total,
                   float* reduced) const;

  const std::vector<PowerSgdTensor> tensors_;
  const ParallelFor parallel_for_;
  std::vector<Block> blocks_;
  std::vector<int64_t> left_begin_;   // of each tensor
  std::vector<int64_t> right_begin_;  // of each tensor
  int64_t left_size_ = 1;
  int64_t right_size_ = 0;
};

}  // namespace gradcomp
