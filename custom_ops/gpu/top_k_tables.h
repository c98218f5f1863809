// What the host tells top-k's kernels, and what they tell each other. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_

#include "fixed_tables.h"

namespace gradcomp::gpu {

constexpr int kTopKDigits = 1 << 11;  // of the first digit; the others have fewer

struct TopKTensor : FixedTensor {
  long long entries;  // that are sent
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
struct TopKEncodeStep : FixedEncodeStep<TopKTensor> {
  unsigned long long* histograms;  // kTopKDigits of each tensor; 0 before each digit is counted
  TopKLast* last;                  // of each tensor; 0 and the number of entries at first
  TopKCounts* counts;              // of each slice
  int shift;                       // of the digit
  int num_digits;                  // how many values it has
};

using TopKDecodeStep = FixedDecodeStep<TopKTensor>;

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_
