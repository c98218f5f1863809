// The data that the host and AdaComp's GPU kernels exchange. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

// The threads of a CUDA block that reads a piece. Many small blocks wait for memory and for
// barriers at different times.
constexpr int kScanThreads = 256;

// The largest size of a piece. A piece may begin anywhere, but vectors of 4 elements are read from
// multiples of 4.
constexpr int kPieceElements = 8 * kScanThreads - 4;
constexpr int kPieceBins = 2 * kScanThreads;

// The size of a tensor's block, as in kernels/adacomp_layout.h, unless a bin is larger.
constexpr int kBlockElements = 1 << 16;

// A warp decodes a unit of some bins of a block: up to this many elements, in shared memory, or a
// single larger bin. All units of a block, except the last, have at least half as many elements.
constexpr int kUnitElements = 512;
constexpr int kBlockUnits = 2 * kBlockElements / kUnitElements;

// The number of payloads that are decoded together.
constexpr int kPayloadsAtOnce = 16;

// A tensor of a step. kernels/adacomp_layout.h cuts it into bins and blocks. A block is cut into
// pieces of whole bins, which CUDA blocks read and warps pack; a single bin may be larger than a
// piece.
struct EncodeTensor {
  float* residual;        // updated in place
  float* second_moment;   // updated in place; null: the gradient is not divided
  const void* gradient;
  const float* squares;   // replaces the gradient's squares, if given
  int gradient_type;      // GradientType: float, half, bfloat16
  int sent_whole;
  int code_bytes;         // 1 or 2
  int bins_per_piece;
  long long size;         // elements
  long long bin_size;     // for a tensor sent whole, the unit of its check
  long long num_bins;
  long long bins_per_block;
  long long pieces_per_block;
  long long num_pieces;
  long long length_words;  // words of block lengths before the codes
  long long first_piece;   // index among the step's pieces
  long long first_bin;     // index among the step's bins
  long long first_room;    // offset in the room for codes, which has a code for each element
  Adam adam;
};

// The arguments of the encoding kernels.
struct EncodeStep {
  const EncodeTensor* tensors;
  long long num_tensors;
  long long num_pieces;
  int* not_finite;   // 0 before the first launch; 1 if a gradient or its square is not finite
  float boost;       // scale factor - 1
  float* bin_max;          // for each bin
  unsigned char* room;     // for the codes of each piece
  unsigned* piece_codes;   // the number of codes of each piece
  double* piece_sum;       // the sum of each piece's bin maxima
  long long* piece_byte;   // the offset of each piece's codes in its tensor's codes
  float* scale; // for each tensor
  unsigned* code_words; // for each tensor
  long long* first_word;   // the offset of each tensor's codes in the body
  struct EncodeSummary* summary;
  int* body;               // the payload after the header
};

struct EncodeSummary {
  long long body_words;  // 0 if not finite
  long long finite;
};

// The codes of a tensor's block in a payload.
struct DecodeSpan {
  const unsigned char* codes;  // float32 values for a tensor sent whole; null: nothing was sent
  unsigned num_codes;
  float scale;
};

struct DecodeBlock {
  float* values;          // the beginning of the block
  unsigned size;          // elements
  unsigned bin_size;
  unsigned bins_per_unit;
  int sent_whole;
  int code_bytes;
};

struct DecodeStep {
  const DecodeBlock* blocks;
  const DecodeSpan* spans;  // by payload, then block
  long long num_blocks;
  int num_payloads;
  int adds;  // whether to add to the values; otherwise they are overwritten
};

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_TABLES_H_
