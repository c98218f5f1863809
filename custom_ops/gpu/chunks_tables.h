// The data that the host and the kernels for chunks exchange. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_CHUNKS_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_CHUNKS_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

// As ChunkLayout::Chunked. A piece has the chunks of a CUDA block that chooses.
struct ChunkTensor {
  float* residual;
  const void* gradient;
  float* output;  // for apply; null without an output
  int gradient_type;  // GradientType: float, half, bfloat16
  int width;  // the number of threads that share a chunk: 1, a warp, or a block
  long long size;  // elements
  long long chunk_size;
  long long bits;
  long long num_chunks;
  long long first_chunk;
  long long first_word;
  long long first_piece;
  long long first_slice;
};

// The arguments of the kernels of an op.
struct ChunkStep {
  const ChunkTensor* tensors;
  long long num_tensors;
  long long num_chunks;
  long long num_words;
  unsigned* chosen;      // in each chunk; null if the launch only checks finiteness
  int* not_finite;       // 0 before the first launch
  int* offsets;          // packed; written by pack, and read by the later kernels
  float* values;         // for each chunk, the taken value, or the rest at the chosen place
  const float* totals; // for each chunk
  const float* rests;    // for each chunk; null: none
  float filter;
  float kept_share;      // 1 - filter
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_CHUNKS_TABLES_H_
