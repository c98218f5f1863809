// The interface of a method with payloads of fixed length, for one tensor. fixed_length.h has the
// code that all such methods share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "common.h"
#include "source.h"

namespace gradcomp {

// The replica and the step, on which random numbers depend.
struct Turn {
  int64_t step;
  int64_t replica;
  int64_t tensor;
};

// Encodes a tensor in passes over its blocks. A pass begins when all tensors have ended the pass
// before.
class TensorEncoder {
 public:
  explicit TensorEncoder(int num_passes) : num_passes_(num_passes) {}
  virtual ~TensorEncoder() = default;

  int num_passes() const { return num_passes_; }

  // Runs a pass on a block, in parallel with other blocks. Pass 0 checks whether all sums are
  // finite, and does not change the residual. If a sum of any tensor is not finite, no other pass
  // follows. After the last pass, all words are written, and the residual has the unsent part.
  virtual void RunBlock(int pass, int64_t block) = 0;

  // Called when all blocks of a pass are done.
  virtual void EndPass(int /*pass*/) {}

  bool finite() const { return finite_; }

 protected:
  void SetNotFinite() { finite_ = false; }

 private:
  const int num_passes_;
  std::atomic<bool> finite_{true};
};

// The layout of a tensor in payloads. The layout determines the blocks, so results don't depend on
// the number of threads.
class Codec {
 public:
  Codec(int64_t size, int64_t words, int64_t block_size)
      : size_(size), words_(words), block_size_(block_size) {}
  virtual ~Codec() = default;

  int64_t size() const { return size_; }    // elements
  int64_t words() const { return words_; }  // words in a payload
  int64_t num_blocks() const { return CeilDiv(size_, block_size_); }
  int64_t BlockBegin(int64_t block) const { return block * block_size_; }
  int64_t BlockEnd(int64_t block) const { return std::min(size_, (block + 1) * block_size_); }

  // Creates an encoder, which the codec and all arguments must outlive. `words` need not be
  // initialized.
  virtual std::unique_ptr<TensorEncoder> NewEncoder(const Source& source, const Turn& turn,
                                                    int32_t* words) const = 0;

  // Checks all words of a tensor, which come from another replica.
  virtual Status Check(const int32_t* words) const = 0;

  // Adds the values of a block, decoded from checked words. `values` is the beginning of the
  // tensor, not of the block.
  virtual void AddBlock(const int32_t* words, int64_t block, float* values) const = 0;

  // Returns an upper bound of the magnitudes of the values in checked words.
  virtual double LargestMagnitude(const int32_t*) const {
    return std::numeric_limits<double>::infinity();
  }

 private:
  const int64_t size_;
  const int64_t words_;
  const int64_t block_size_;
};

}  // namespace gradcomp
