// Sums of one entry per chunk, at places that are equal on all replicas: ScaleCom and RandomK.
//
// Each tensor is cut into chunks. The places are sent as packed offsets within the chunks: see
// docs/payload_format.md.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "source.h"

namespace gradcomp {

inline constexpr int64_t kMaxChunkSize = 65536;

// The chunks of tensors, which depend only on the sizes of tensors and chunks.
class ChunkLayout {
 public:
  struct Chunked {
    int64_t size;
    int64_t chunk_size;
    int64_t bits;  // of an offset
    int64_t num_chunks;
    int64_t first_chunk;  // counted over all tensors
    int64_t first_word;   // counted over all tensors
  };

  // Chunks that a thread processes. The offsets of a block begin and end at word boundaries.
  struct Block {
    int64_t tensor;
    int64_t begin;  // the elements [begin, end) of the tensor
    int64_t end;
    int64_t chunk_size;
    int64_t bits;
    int64_t num_chunks;
    int64_t first_chunk;  // counted over all tensors
    int64_t first_word;   // counted over all tensors
  };

  ChunkLayout(const std::vector<int64_t>& sizes, const std::vector<int64_t>& chunk_sizes);

  int64_t num_chunks() const { return num_chunks_; }
  int64_t num_words() const { return num_words_; }  // of packed offsets
  const std::vector<Chunked>& tensors() const { return tensors_; }
  const std::vector<Block>& blocks() const { return blocks_; }

 private:
  std::vector<Chunked> tensors_;
  std::vector<Block> blocks_;
  int64_t num_chunks_ = 0;
  int64_t num_words_ = 0;
};

// Describes the first setting that is out of range.
Status CheckChunks(const std::vector<int64_t>& chunk_sizes, int64_t num_tensors);

// Chooses the first entry with the largest magnitude of residual + gradient in each chunk, if
// `offsets` is given. Returns whether all sums are finite.
bool SelectLargest(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for, int32_t* offsets);

// Chooses a pseudo-random entry of each chunk, which depends only on `step`.
void DrawOffsets(const ChunkLayout& layout, uint64_t step, int32_t* offsets);

// Checks that each offset lies in its chunk, because offsets come from another replica.
Status CheckOffsets(const ChunkLayout& layout, const int32_t* offsets);

// values[i] = residual + gradient at the place chosen in chunk i.
void TakeChosen(const ChunkLayout& layout, const std::vector<Source>& tensors,
                const int32_t* offsets, const ParallelFor& parallel_for, float* values);

// Applies the sums over all replicas. Outputs are the totals at the chosen places, and zeros
// elsewhere. A residual is multiplied by (1 - filter) at chosen places, and elsewhere adds filter
// times the gradient (ScaleCom, section 3). If `rests` is given, chunk i has sent its sum without
// rests[i], and its residual adds filter times rests[i], too.
void ApplyTotals(const ChunkLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* offsets, const float* totals, const float* rests, float filter,
                 const ParallelFor& parallel_for, const std::vector<float*>& outputs);

// Adds filter times the gradient to all residuals, after a step in which nothing was sent.
void KeepGradients(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   float filter, const ParallelFor& parallel_for);

}  // namespace gradcomp
