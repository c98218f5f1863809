// The one pass over memory of AdaComp's encoder, for several instruction sets.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_H_

#include <cstdint>

#include "floats.h"

namespace gradcomp {

enum class Simd { kPortable, kAvx2, kAvx512 };

// A run of whole bins of one tensor (the last may be short).
struct BinRun {
  float* residual;
  const void* gradient;
  int64_t size;  // elements
  int64_t bin_size;
  float boost;     // scale factor - 1
  float* bin_max;  // one per bin, written
};

// Adds the gradient into the residual, notes the maximum of each bin, appends the codes of what is
// to be sent, and returns where they end. `codes` has room for size + kCodeSlack of them. A bin with
// a value that is not finite is left as it was and has an infinite or NaN maximum.
using ScanBins = uint8_t* (*)(const BinRun& run, uint8_t* codes);

inline constexpr int64_t kCodeSlack = 16;  // vectors of codes are stored whole

// All variants give the same bits. Bins of size 0 have no codes: see ScanDense.
ScanBins FindScanBins(Simd simd, GradientType type, int64_t bin_size);

// For a tensor that is sent whole: adds, and notes the maxima, without codes.
void ScanDense(GradientType type, const BinRun& run);

bool IsSupported(Simd simd);  // by this processor and this build
Simd BestSimd();
const char* Name(Simd simd);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_H_
