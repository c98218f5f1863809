#include "scan_bins_variants.h"

#ifdef GRADCOMP_X86

#ifndef __clang__  // gcc 12 warns about its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <algorithm>

#include "adacomp_codes.h"
#include "one_lane.h"

namespace gradcomp {
namespace {

// The target applies to functions, not to the file: see scan_bins_avx2.cc.
#define GRADCOMP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,bmi,popcnt")))
#define GRADCOMP_INLINE GRADCOMP_TARGET __attribute__((always_inline))

struct Vector {
  static constexpr int64_t kWidth = 16;
  using Floats = __m512;
  using Words = __m512i;
  using Mask = __mmask16;

  GRADCOMP_INLINE static Floats Load(const float* from) { return _mm512_loadu_ps(from); }
  GRADCOMP_INLINE static Floats Load(const Half* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  GRADCOMP_INLINE static Floats Load(const BFloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  GRADCOMP_INLINE static void Store(Floats values, float* to) { _mm512_storeu_ps(to, values); }
  GRADCOMP_INLINE static Floats Broadcast(float value) { return _mm512_set1_ps(value); }
  GRADCOMP_INLINE static Words Broadcast(uint32_t value) {
    return _mm512_set1_epi32(static_cast<int>(value));
  }

  GRADCOMP_INLINE static Words Magnitude(Floats values) {
    return _mm512_and_si512(_mm512_castps_si512(values), Broadcast(~kSignBit));
  }
  GRADCOMP_INLINE static Words Max(Words a, Words b) { return _mm512_max_epu32(a, b); }
  GRADCOMP_INLINE static uint32_t LargestLane(Words lanes) {
    return _mm512_reduce_max_epu32(lanes);
  }

  GRADCOMP_INLINE static Mask Sent(Floats accumulated, Floats boosted, Words bin_max) {
    const Mask reached = _mm512_cmpge_epu32_mask(Magnitude(boosted), bin_max);
    return _mm512_mask_test_epi32_mask(reached, _mm512_castps_si512(accumulated),
                                       Broadcast(~kSignBit));
  }
  GRADCOMP_INLINE static uint32_t Bits(Mask sent) { return sent; }
  GRADCOMP_INLINE static Floats Subtract(Floats accumulated, Floats scale, Mask sent) {
    const Words sign = _mm512_and_si512(_mm512_castps_si512(accumulated), Broadcast(kSignBit));
    const Words sent_value = _mm512_or_si512(_mm512_castps_si512(scale), sign);
    return _mm512_mask_sub_ps(accumulated, sent, accumulated, _mm512_castsi512_ps(sent_value));
  }

  // Has no branch on the sent lanes, because they are random.
  template <typename Code>
  GRADCOMP_INLINE static Code* Append(Floats accumulated, uint32_t sent, int64_t first,
                                      Code* codes) {
    const Words lanes = _mm512_add_epi32(
        _mm512_set_epi32(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0),
        Broadcast(static_cast<uint32_t>(first << 2)));
    const Words sign = _mm512_srli_epi32(_mm512_castps_si512(accumulated), 30);
    const Words code = _mm512_or_si512(lanes, _mm512_and_si512(sign, Broadcast(kNegative)));
    StoreCodes(_mm512_maskz_compress_epi32(static_cast<Mask>(sent), code), codes);
    return codes + _mm_popcnt_u32(sent);
  }

 private:
  GRADCOMP_INLINE static void StoreCodes(__m512i codes, Code8* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
  }
  GRADCOMP_INLINE static void StoreCodes(__m512i codes, Code16* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(codes));
  }
};

#include "scan_bins-inl.h"

}  // namespace

BinKernels Avx512BinKernels(GradientType type, int64_t bin_size) {
  return KernelsOf(type, bin_size);
}

}  // namespace gradcomp

#endif  // GRADCOMP_X86
