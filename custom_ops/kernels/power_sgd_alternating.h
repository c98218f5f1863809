// PowerSGD with one sum in each step: a tensor sends P in one step and Q in the next.
//
// Of each tensor, orthonormal columns of one side are known to all replicas, from the sum of the step
// before. With Q known, a replica sends P = M Q; with P known, it sends Q = M^T P. A factor is
// [rows + columns, factor_columns], P above Q. The side that is known has its columns there; the
// other one is zeros. So the next side depends on the tensor's own state alone, whatever steps were
// skipped or were other tensors' alone.
//
// The vector that is summed has a flag, 0 or NaN, each P, or tensor that is sent whole, and then each Q.
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

  // Elements of the vector that is summed, and of a tensor in it.
  int64_t size() const { return lefts_->left_size() + rights_->right_size(); }
  int64_t sent_size(int64_t tensor) const;

  // What a replica sends. Returns whether all of M is finite; if not, the flag is NaN. Where the product
  // of what is sent may overflow, a NaN will be seen in the sum.
  bool Project(float* own) const;

  // Whether the sum and its products are finite.
  bool CanReduce(const float* total) const;

  // reduced = the total's product, or what was summed whole; residual = M - the own product, or zeros.
  // The factors get the total. `reduced` may be where the gradient is.
  void Reduce(const float* own, const float* total, const std::vector<float*>& reduced) const;

  // residual = M; zeros where the total is too large though all replicas are finite.
  void Keep(const float* total) const;

 private:
  // Calls work(tensor, where it begins in the vector).
  template <typename Work>
  void ForEachTensor(const Work& work) const;
  bool Fits(int64_t tensor, const float* sent) const;
  float* RightOf(int64_t tensor) const;
  void Store(const float* total) const;

  const std::vector<PowerSgdTensor> tensors_;
  const std::vector<float*> factors_;
  std::vector<char> sends_right_;  // of each tensor
  std::vector<int64_t> left_numbers_;  // of the tensors that send P, or all of themselves
  std::vector<int64_t> right_numbers_;
  std::unique_ptr<PowerSgd> lefts_;
  std::unique_ptr<PowerSgd> rights_;
  std::vector<float> known_rights_;  // orthonormal Q of `lefts_`
  std::vector<float> known_lefts_;   // orthonormal P of `rights_`, behind a flag
};

}  // namespace gradcomp
