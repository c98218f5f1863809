// The choice of vector instructions. All variants of a kernel give the same bits, because no operation
// is contracted or reordered.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADCOMP_X86 1
#endif

namespace gradcomp {

enum class Simd { kPortable, kAvx2, kAvx512 };

bool IsSupported(Simd simd);  // by this processor and this build
Simd BestSimd();              // the widest supported one that GRADCOMP_SIMD allows
const char* Name(Simd simd);

// Functions that variants call must be inlined into the variants.
#define GRADCOMP_INLINED __attribute__((always_inline))
#define GRADCOMP_PART inline GRADCOMP_INLINED

#ifdef GRADCOMP_X86
template <typename Body, typename... Args>
__attribute__((target("avx2"))) auto CallOnAvx2(const Body& body, Args&... args) {
  return body(args...);
}
#endif

// A function that is compiled twice, for any processor and for AVX2, and runs the variant that BestSimd
// allows. The function's body is a lambda that is GRADCOMP_INLINED.
template <typename Body>
struct Vectorized {
  template <typename... Args>
  auto operator()(Args&&... args) const {
#ifdef GRADCOMP_X86
    if (BestSimd() != Simd::kPortable) return CallOnAvx2(body, args...);
#endif
    return body(args...);
  }

  Body body;
};
template <typename Body>
Vectorized(Body) -> Vectorized<Body>;

}  // namespace gradcomp
