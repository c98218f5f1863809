// PowerSGD with one sum in each step: a tensor sends P in one step and Q in the next.
//
// All replicas know orthonormal columns of one side of each tensor, from the sum of the step
// before. If Q is known, a replica sends P = M Q; if P is known, it sends Q = M^T P. A factor is
// [rows + columns, factor_columns], with P above Q. The factor has the columns of the known side,
// and zeros for the other side. The next side therefore depends only on the tensor's own state, and
// not on skipped steps or on steps of other tensors.
//
// The summed vector has a flag, 0 or NaN, then each P and each tensor that is sent whole, and then
// each Q.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "power_sgd.h"

namespace gradcomp {

class AlternatingPowerSgd {
 public:
  AlternatingPowerSgd(const std::vector<PowerSgdTensor>& tensors,
                      const std::vector<float*>& factors, int64_t step,
                      const ParallelFor& parallel_for);

  // The number of elements of the summed vector, and of a tensor's part of it.
  int64_t size() const { return lefts_->left_size() + rights_->right_size(); }
  int64_t sent_size(int64_t tensor) const;

  // Computes a replica's vector. Returns whether M is finite for all tensors; if not, the flag is
  // NaN. If a product of sent factors may overflow, the sum becomes NaN.
  bool Project(float* local) const;

  // Returns whether the sum and its products are finite.
  bool CanReduce(const float* total) const;

  // Computes reduced = the product with the total, and residual = M - the product with `local`.
  // For a tensor sent whole, reduced is the sum, and the residual is zero. Stores the total in the
  // factors. `reduced` may share the gradient's memory.
  void Reduce(const float* local, const float* total, const std::vector<float*>& reduced) const;

  // Sets residual = M, and zeros for tensors whose total is too large although all replicas are
  // finite.
  void Keep(const float* total) const;

 private:
  // Calls work(tensor, its offset in the vector).
  template <typename Work>
  void ForEachTensor(const Work& work) const;
  bool Fits(int64_t tensor, const float* sent) const;
  float* RightOf(int64_t tensor) const;
  void Store(const float* total) const;

  const std::vector<PowerSgdTensor> tensors_;
  const std::vector<float*> factors_;
  std::vector<char> sends_right_;  // of each tensor
  std::vector<int64_t> left_numbers_;  // the tensors that send P or are sent whole
  std::vector<int64_t> right_numbers_;
  std::unique_ptr<PowerSgd> lefts_;
  std::unique_ptr<PowerSgd> rights_;
  std::vector<float> known_rights_;  // the orthonormal Q of `lefts_`
  std::vector<float> known_lefts_;   // the orthonormal P of `rights_`, after a flag
};

}  // namespace gradcomp
