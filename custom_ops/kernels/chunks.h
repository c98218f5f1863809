// Sums of one entry per chunk, at places that all replicas agree on: ScaleCom and RandomK.
//
// Each tensor is cut into chunks. The places travel as offsets within the chunks, packed:
// docs/payload_format.md.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "source.h"

namespace gradcomp {

inline constexpr int64_t kMaxChunkSize = 65536;

// How tensors are cut into chunks, by their sizes alone.
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

  // Chunks that one thread works on. Their offsets begin and end with a word.
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

// Chooses the entry of largest magnitude of residual + gradient in each chunk, the first of equals,
// if `offsets` is given. Returns whether all sums are finite.
bool SelectLargest(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for, int32_t* offsets);

// Chooses an entry of each chunk at random, by `seed` and `step` alone.
void DrawOffsets(const ChunkLayout& layout, uint64_t seed, uint64_t step, int32_t* offsets);

// Offsets come from another replica: checks that each lies in its chunk.
Status CheckOffsets(const ChunkLayout& layout, const int32_t* offsets);

// values[i] = residual + gradient at the place chosen in chunk i.
void TakeChosen(const ChunkLayout& layout, const std::vector<Source>& tensors,
                const int32_t* offsets, const ParallelFor& parallel_for, float* values);

// What all replicas gave is summed: outputs are the totals at the chosen places, else zeros; a
// residual keeps (1 - filter) of itself where its sum with the gradient was sent, and elsewhere
// takes filter times the gradient (ScaleCom, section 3). If `rests` is given, only the sum less
// rests[i] was sent for chunk i, and the residual takes filter times it, too.
void ApplyTotals(const ChunkLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* offsets, const float* totals, const float* rests, float filter,
                 const ParallelFor& parallel_for, const std::vector<float*>& outputs);

// Nothing was sent: residuals take filter times the gradient everywhere.
void KeepGradients(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   float filter, const ParallelFor& parallel_for);

}  // namespace gradcomp
