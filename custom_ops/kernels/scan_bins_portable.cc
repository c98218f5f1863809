#include <algorithm>

#include "adacomp_codes.h"
#include "one_lane.h"
#include "scan_bins_variants.h"

namespace gradcomp {
namespace {

using Vector = OneLane;

#define GRADCOMP_TARGET
#include "scan_bins-inl.h"

}  // namespace

BinKernels PortableBinKernels(GradientType type, int64_t bin_size) {
  return KernelsOf(type, bin_size);
}

}  // namespace gradcomp
