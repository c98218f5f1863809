// The data that the host and top-k's kernels exchange. NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_

#include "fixed_tables.h"

namespace gradcomp::gpu {

constexpr int kTopKDigits = 1 << 11;  // values of the first digit; the other digits have fewer

struct TopKTensor : FixedTensor {
  long long entries;  // to be sent
};

// The known digits of a tensor's last sent entry.
struct TopKLast {
  unsigned magnitude;  // the known digits
  long long rank;      // its rank among the entries with these digits, from the top
};

// The numbers of a slice's entries that are larger than, and equal to, the last sent entry; later,
// these numbers for all slices of the tensor before it.
struct TopKCounts {
  long long above;
  long long equal;
};

// The arguments of the encoding kernels; count and pick are launched for each digit.
struct TopKEncodeStep : FixedEncodeStep<TopKTensor> {
  unsigned long long* histograms;  // kTopKDigits for each tensor; 0 before each digit is counted
  TopKLast* last;                  // for each tensor; at first 0 and the number of entries
  TopKCounts* counts;              // for each slice
  int shift;                       // of the digit
  int num_digits;                  // the number of values of the digit
};

using TopKDecodeStep = FixedDecodeStep<TopKTensor>;

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_TOP_K_TABLES_H_
