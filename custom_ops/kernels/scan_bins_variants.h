// One FindScanBins per instruction set, for scan_bins.cc alone.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_VARIANTS_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_VARIANTS_H_

#include "scan_bins.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADCOMP_X86 1
#endif

namespace gradcomp {

ScanBins FindScanBinsPortable(GradientType type, int64_t bin_size);
#ifdef GRADCOMP_X86
ScanBins FindScanBinsAvx2(GradientType type, int64_t bin_size);
ScanBins FindScanBinsAvx512(GradientType type, int64_t bin_size);
#endif

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_VARIANTS_H_
