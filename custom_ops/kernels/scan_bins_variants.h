// Declares a function for each instruction set, only for scan_bins.cc.
#pragma once

#include "scan_bins.h"

namespace gradcomp {

BinKernels PortableBinKernels(GradientType type, int64_t bin_size);
#ifdef GRADCOMP_X86
BinKernels Avx2BinKernels(GradientType type, int64_t bin_size);
BinKernels Avx512BinKernels(GradientType type, int64_t bin_size);
#endif

}  // namespace gradcomp
