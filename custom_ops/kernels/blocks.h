// Tensors cut into blocks, all of which can be worked on in parallel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "floats.h"

namespace gradcomp {

class Blocks {
 public:
  void AddTensor(int64_t num_blocks) { first_.push_back(first_.back() + num_blocks); }

  // Calls work(tensor, block) for every block of every tensor. `cost` is the cost of one
  // block. Each thread calls a separate copy of `work`, which may keep memory between blocks.
  template <typename BlockWork>
  void ForEach(const ParallelFor& parallel_for, int64_t cost, const BlockWork& work) const {
    parallel_for(first_.back(), cost, [&](int64_t begin, int64_t end) {
      const IeeeArithmetic ieee;
      BlockWork own_work = work;
      const auto after = std::upper_bound(first_.begin(), first_.end(), begin);
      int64_t tensor = after - first_.begin() - 1;
      for (int64_t i = begin; i < end; ++i) {
        while (i >= first_[tensor + 1]) ++tensor;
        own_work(tensor, i - first_[tensor]);
      }
    });
  }

 private:
  std::vector<int64_t> first_{0};  // block of each tensor, and the number of all blocks
};

}  // namespace gradcomp
