#include "scan_bins.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "scan_bins_scalar.h"
#include "scan_bins_variants.h"

namespace gradcomp {
namespace {

template <typename Gradient>
void ScanDenseBins(const BinRun& run) {
  const Gradient* gradient = static_cast<const Gradient*>(run.gradient);
  float* bin_max = run.bin_max;
  for (int64_t begin = 0; begin < run.size; begin += run.bin_size) {
    const int64_t end = std::min(begin + run.bin_size, run.size);
    const uint32_t maximum = ScalarMaximum(run.residual, gradient, begin, end, 0);
    *bin_max++ = FromBits(maximum);
    if (!IsFiniteMagnitude(maximum)) continue;
    for (int64_t i = begin; i < end; ++i) run.residual[i] += ToFloat(gradient[i]);
  }
}

}  // namespace

void ScanDense(GradientType type, const BinRun& run) {
  switch (type) {
    case GradientType::kFloat:
      return ScanDenseBins<float>(run);
    case GradientType::kHalf:
      return ScanDenseBins<Half>(run);
    case GradientType::kBFloat16:
      return ScanDenseBins<BFloat16>(run);
  }
}

ScanBins FindScanBins(Simd simd, GradientType type, int64_t bin_size) {
#ifdef GRADCOMP_X86
  if (simd == Simd::kAvx512) return FindScanBinsAvx512(type, bin_size);
  if (simd == Simd::kAvx2) return FindScanBinsAvx2(type, bin_size);
#endif
  (void)simd;
  return FindScanBinsPortable(type, bin_size);
}

bool IsSupported(Simd simd) {
  if (simd == Simd::kPortable) return true;
#ifdef GRADCOMP_X86
  __builtin_cpu_init();
  // Not asked for, because clang 14 can't: F16C, which every processor with AVX2 has.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("popcnt");
  if (simd == Simd::kAvx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

Simd BestSimd() {
  static const Simd best = [] {
    const char* named = std::getenv("GRADCOMP_SIMD");  // ops/library.py refuses other names
    const std::string_view limit = named ? named : "";
    if (limit == "portable") return Simd::kPortable;
    if (limit != "avx2" && IsSupported(Simd::kAvx512)) return Simd::kAvx512;
    return IsSupported(Simd::kAvx2) ? Simd::kAvx2 : Simd::kPortable;
  }();
  return best;
}

const char* Name(Simd simd) {
  switch (simd) {
    case Simd::kPortable:
      return "portable";
    case Simd::kAvx2:
      return "AVX2";
    case Simd::kAvx512:
      return "AVX-512";
  }
  return "unknown";
}

}  // namespace gradcomp
