#include "simd.h"

#include <cstdlib>
#include <string_view>

namespace gradcomp {

bool IsSupported(Simd simd) {
  if (simd == Simd::kPortable) return true;
#ifdef GRADCOMP_X86
  __builtin_cpu_init();
  // F16C is not checked, because clang 14 can't; every processor with AVX2 has it.
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
