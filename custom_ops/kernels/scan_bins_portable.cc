#include <algorithm>

#include "adacomp_codes.h"
#include "scan_bins_scalar.h"
#include "scan_bins_variants.h"

namespace gradcomp {
namespace {

template <typename Gradient, typename Code>
Code* ScanBin(float* residual, const Gradient* gradient, int64_t size, float boost,
              uint32_t* maximum, Code* codes) {
  *maximum = ScalarMaximum(residual, gradient, 0, size, 0);
  if (IsLeftAlone(*maximum, residual, size)) return codes;
  return ScalarSelect(residual, gradient, 0, size, boost, *maximum, codes);
}

#define GRADCOMP_TARGET
#include "scan_bins-inl.h"

}  // namespace

ScanBins FindScanBinsPortable(GradientType type, int64_t bin_size) {
  return FindImpl(type, bin_size);
}

}  // namespace gradcomp
