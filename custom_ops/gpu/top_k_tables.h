// What the host tells top-k's kernels, and what they tell each other. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_

#include "tables.h"

namespace gradcomp {
namespace gpu {

constexpr int kTopKDigits = 1 << 11;  // of the first digit; the others have fewer

struct TopKTensor {
  float* values;  // the residual, updated in place; of a decoder, the output
  const void* gradient;
  int gradient_type;     // GradientType: float, half, bfloat16
  int sent_whole;
  long long size;        // elements
  long long entries;     // that are sent
  long long first_slice;
  long long first_word;  // in the body of a payload
};

// What is known of the last entry to be sent, of a tensor.
struct TopKLast {
  unsigned magnitude;  // its digits so far
  long long rank;      // from the top, among those with these digits
};

// Of a slice: how many entries are above the last one to be sent, and how many equal it; then, how many
// of the tensor there are in front.
struct TopKCounts {
  long long above;
  long long equal;
};

// One launch of each encoding kernel; of count and pick one for each digit.
struct TopKEncodeStep {
  const TopKTensor* tensors;
  long long num_tensors;
  unsigned long long* histograms;  // kTopKDigits of each tensor; 0 before each digit is counted
  TopKLast* last;                  // of each tensor; 0 and the number of entries at first
  TopKCounts* counts;              // of each slice
  int* not_finite;                 // 0 before the first launch
  int* body;                       // of the payload; 0 before, and where not all is finite
  int shift;                       // of the digit
  int num_digits;                  // how many values it has
};

struct TopKDecodeStep {
  const TopKTensor* tensors;
  long long num_tensors;
  const int* bodies;       // of all payloads, one behind the other
  long long body_words;    // of each
  int num_payloads;
  int adds;                // whether to add to the values; otherwise they are overwritten
};

}  // namespace gpu
}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_
