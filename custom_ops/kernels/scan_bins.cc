#include "scan_bins.h"

#include "scan_bins_variants.h"

namespace gradcomp {

BinKernels FindBinKernels(Simd simd, GradientType type, int64_t bin_size) {
#ifdef GRADCOMP_X86
  if (simd == Simd::kAvx512) return Avx512BinKernels(type, bin_size);
  if (simd == Simd::kAvx2) return Avx2BinKernels(type, bin_size);
#endif
  (void)simd;
  return PortableBinKernels(type, bin_size);
}

}  // namespace gradcomp
