// What the host tells the kernels for chunks, and what they tell it. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_CHUNKS_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_CHUNKS_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

// As ChunkLayout::Chunked. A piece is the chunks that a CUDA block chooses in.
struct ChunkTensor {
  float* residual;
  const void* gradient;
  float* output;  // of apply; null: there is none
  int gradient_type;  // GradientType: float, half, bfloat16
  int width;  // how many threads choose in a chunk together: 1, those of a warp, or all of a block
  long long size;  // elements
  long long chunk_size;
  long long bits;
  long long num_chunks;
  long long first_chunk;
  long long first_word;
  long long first_piece;
  long long first_slice;
};

// One launch of each kernel of an op.
struct ChunkStep {
  const ChunkTensor* tensors;
  long long num_tensors;
  long long num_chunks;
  long long num_words;
  unsigned* chosen;      // in each chunk; null: only whether all is finite counts
  int* not_finite;       // 0 before the first launch
  int* offsets;          // packed: written by pack, and read by what comes behind
  float* values;         // of each chunk: what was taken, or what is kept at the chosen place
  const float* totals;   // of each chunk
  const float* rests;    // likewise; null: none
  float filter;
  float kept_share;      // 1 - filter
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_CHUNKS_TABLES_H_
