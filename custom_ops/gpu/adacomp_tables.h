// What the host tells AdaComp's kernels on a GPU, and what they tell it. NVRTC reads this file,
// too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_TABLES_H_

#include "tables.h"

namespace gradcomp::gpu {

// Of a CUDA block that reads a piece. More of them, of fewer threads, wait for memory and for each other
// at different times.
constexpr int kScanThreads = 256;

// Of a piece, at most. It may begin anywhere, but vectors of 4 elements are read from multiples of 4 on.
constexpr int kPieceElements = 8 * kScanThreads - 4;
constexpr int kPieceBins = 2 * kScanThreads;

// Of a block of a tensor, as kernels/adacomp_layout.h cuts it, if a bin is not larger.
constexpr int kBlockElements = 1 << 16;

// A block is decoded in units of some bins, one by a warp: so many elements, which it has in its shared
// memory, or a single bin. No unit but the last of a block has less than half as many.
constexpr int kUnitElements = 512;
constexpr int kBlockUnits = 2 * kBlockElements / kUnitElements;

// Payloads that are decoded together.
constexpr int kPayloadsAtOnce = 16;

// A tensor of a step. It is cut into bins and blocks as kernels/adacomp_layout.h says, and blocks into
// pieces of whole bins, which CUDA blocks read and warps pack; a single bin may be larger.
struct EncodeTensor {
  float* residual;        // updated in place
  float* second_moment;   // likewise; null: the gradient is not divided
  const void* gradient;
  const float* squares;   // in place of the gradient's own, if given
  int gradient_type;      // GradientType: float, half, bfloat16
  int sent_whole;
  int code_bytes;         // 1 or 2
  int bins_per_piece;
  long long size;         // elements
  long long bin_size;     // of a tensor sent whole: those in which it is checked
  long long num_bins;
  long long bins_per_block;
  long long pieces_per_block;
  long long num_pieces;
  long long length_words;  // block lengths in front of the codes
  long long first_piece;   // of all pieces of the step
  long long first_bin;     // of all bins
  long long first_room;    // byte of the room for codes; a code for each element
  Adam adam;
};

// One launch of each encoding kernel.
struct EncodeStep {
  const EncodeTensor* tensors;
  long long num_tensors;
  long long num_pieces;
  int* not_finite;   // 0 before the first launch: whether a gradient, or what is its square, is not
  float boost;       // scale factor - 1
  float* bin_max;          // of each bin
  unsigned char* room;     // for the codes of each piece
  unsigned* piece_codes;   // how many codes a piece has
  double* piece_sum;       // of its bins' maxima
  long long* piece_byte;   // where its codes begin in those of the tensor
  float* scale;            // of each tensor
  unsigned* code_words;    // of each tensor
  long long* first_word;   // of each tensor's codes in the body
  struct EncodeSummary* summary;
  int* body;               // the payload behind the header
};

struct EncodeSummary {
  long long body_words;  // 0 if not finite
  long long finite;
};

// Codes of one block of a tensor in one payload.
struct DecodeSpan {
  const unsigned char* codes;  // of a tensor sent whole: float32; null: nothing was sent
  unsigned num_codes;
  float scale;
};

struct DecodeBlock {
  float* values;          // where the block begins
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
