// PowerSGD, which sends gradients as products of two thin matrices.
//
// The residual plus gradient of a tensor is a matrix M, whose columns are the tensor's last axis. M
// is sent as P Q^T, where P is `rows` x `rank` and Q is `columns` x `rank`. One vector has the P of
// all tensors, and another vector has the Q, both transposed: column after column. A tensor of rank
// 0 is sent whole, in place of P.
//
// Partial sums of blocks are added in order, and blocks depend only on shapes, so results don't
// depend on threads. All replicas have the same sums, and compute the same bits from them on any
// processor.
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
  int64_t factor_columns;  // columns of the factor's variable; at least `rank`

  int64_t size() const { return rows * columns; }
  int64_t left_size() const { return rank == 0 ? size() : rank * rows; }
  int64_t right_size() const { return rank * columns; }

  // The size of a block, except the last blocks, for a tensor with a rank.
  int64_t block_rows() const;
  int64_t block_columns() const;
};

// Returns one sentence if the number of ranks differs from the number of tensors.
Status CheckRanks(const std::vector<int64_t>& ranks, int64_t num_tensors);

// Describes in one sentence a rank that is invalid for a tensor.
Status CheckRank(int64_t tensor, int64_t rank, int64_t rows, int64_t columns);

// Makes columns orthonormal in place, by Gram-Schmidt. A column that depends on the columns before
// it becomes zero.
void OrthonormalizeColumns(int64_t rows, int64_t rank, float* columns);

// Returns whether the product of such columns with the transpose of any orthonormal columns is
// finite.
bool CanMultiplyColumns(int64_t rows, int64_t rank, const float* columns);

// Copies the first `rank` columns of a factor, [rows, stride]. Pseudo-random values replace a
// column of zeros, which would stay zero forever.
void TakeColumns(const float* factor, int64_t rows, int64_t stride, int64_t rank,
                 std::mt19937* random, float* columns);

// Stores columns in a factor, scaled to length 1. Columns from the rank on become zeros.
void StoreColumns(const float* columns, int64_t rows, int64_t stride, int64_t rank, float* factor);

class PowerSgd {
 public:
  PowerSgd(const std::vector<PowerSgdTensor>& tensors, ParallelFor parallel_for);

  // The number of elements of the vectors of P and Q. The vector of P begins with a flag, 0 or NaN.
  int64_t left_size() const { return left_size_; }
  int64_t right_size() const { return right_size_; }

  // Returns the factors in the layout of Q; see TakeColumns. The random values of a `step` are
  // equal on all replicas.
  std::vector<float> Start(const std::vector<const float*>& factors, int64_t step) const;

  // Computes P = M start. Returns whether M is finite for all tensors; if not, the flag is NaN.
  bool ComputeLeft(const std::vector<float>& start, float* left) const;

  // Makes the columns of P orthonormal in place. A column that depends on the columns before it
  // becomes zero. Returns whether `left` is finite; if not, nothing changes.
  bool Orthonormalize(float* left) const;

  // Computes Q = M^T P. Returns whether M is finite for all tensors that are not sent whole.
  bool ComputeRight(const float* left, float* right) const;

  // Returns whether P Q^T is finite for any orthonormal P.
  bool CanMultiply(const float* right) const;

  // Puts a NaN into each Q whose product may overflow, so that the sum is NaN.
  void FlagProducts(float* right) const;

  // The factors of a replica, or their sums over all replicas.
  struct Factors {
    const float* left;
    const float* right;
  };

  // Computes reduced = P Q^T of the total factors and residual = M - P Q^T of the local factors.
  // For a tensor sent whole, reduced is the sum, and the residual is zero. `reduced` may share the
  // gradient's memory.
  void Reduce(const Factors& local, const Factors& total, const std::vector<float*>& reduced) const;

  // Returns which tensors have a sum of P, or a product with the sum of Q, that is not finite,
  // although all replicas are finite. Without a reset, these sums would be as large in the next
  // step.
  std::vector<char> TooLarge(const float* left, const float* total) const;

  // Sets residual = M, and zeros for tensors that are too large.
  void Keep(const std::vector<char>& too_large) const;

  // Sets factor = total, with columns scaled to length 1. The scaling changes no product, and gives
  // P the scale of gradients. If a rank grows later, its new columns start from random values.
  void StoreFactors(const float* total, const std::vector<float*>& factors) const;

 private:
  // A piece of a tensor that a thread processes.
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
  void ReduceBlock(const Block& block, const Factors& local, const Factors& total,
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
