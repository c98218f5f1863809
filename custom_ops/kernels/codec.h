// What a method whose payloads have a fixed length does with one tensor. What all such methods
// share is in fixed_length.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "common.h"
#include "source.h"

namespace gradcomp {

// Whose codes they are, and when: what random numbers depend on.
struct Turn {
  int64_t step;
  int64_t replica;
  int64_t tensor;
};

// One tensor while it is encoded: in passes over its blocks, each of which begins when all tensors
// are done with the one before.
class TensorEncoder {
 public:
  explicit TensorEncoder(int num_passes) : num_passes_(num_passes) {}
  virtual ~TensorEncoder() = default;

  int num_passes() const { return num_passes_; }

  // The blocks of a pass run in parallel. Pass 0 finds out whether all sums are finite, and leaves
  // the residual as it is; if they aren't, in any tensor, no other pass follows. The last one has
  // written all words, and left in the residual what they don't say.
  virtual void RunBlock(int pass, int64_t block) = 0;

  // When all blocks of the pass are done.
  virtual void EndPass(int /*pass*/) {}

  bool finite() const { return finite_; }

 protected:
  void SetNotFinite() { finite_ = false; }

 private:
  const int num_passes_;
  std::atomic<bool> finite_{true};
};

// The layout of a tensor in payloads. Blocks depend on nothing else, so that results don't depend
// on the number of threads.
class Codec {
 public:
  Codec(int64_t size, int64_t words, int64_t block_size)
      : size_(size), words_(words), block_size_(block_size) {}
  virtual ~Codec() = default;

  int64_t size() const { return size_; }    // elements
  int64_t words() const { return words_; }  // that they take in a payload
  int64_t num_blocks() const { return CeilDiv(size_, block_size_); }
  int64_t BlockBegin(int64_t block) const { return block * block_size_; }
  int64_t BlockEnd(int64_t block) const { return std::min(size_, (block + 1) * block_size_); }

  // The codec and what it is given must outlive the encoder. `words` need not be initialized.
  virtual std::unique_ptr<TensorEncoder> NewEncoder(const Source& source, const Turn& turn,
                                                    int32_t* words) const = 0;

  // Checks all words of a tensor, which are untrusted.
  virtual Status Check(const int32_t* words) const = 0;

  // Adds what the words, which have been checked, say of the elements of one block. `values` is the
  // tensor, not the block.
  virtual void AddBlock(const int32_t* words, int64_t block, float* values) const = 0;

  // No value that the words, which have been checked, say is of a larger magnitude.
  virtual double LargestMagnitude(const int32_t*) const {
    return std::numeric_limits<double>::infinity();
  }

 private:
  const int64_t size_;
  const int64_t words_;
  const int64_t block_size_;
};

}  // namespace gradcomp
