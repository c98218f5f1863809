#include "scan_bins_variants.h"

#ifdef GRADCOMP_X86

// gcc 12 warns of its own _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include <algorithm>

#include "adacomp_codes.h"
#include "scan_bins_scalar.h"

namespace gradcomp {
namespace {

// On the functions, not on the file: see scan_bins_avx2.cc.
#define GRADCOMP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,bmi,popcnt")))
#define GRADCOMP_INLINE GRADCOMP_TARGET inline __attribute__((always_inline))

constexpr int64_t kWidth = 16;

GRADCOMP_INLINE __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
GRADCOMP_INLINE __m512 Load(const float* from, __mmask16 lanes) {
  return _mm512_maskz_loadu_ps(lanes, from);
}
GRADCOMP_INLINE __m512 Widen(__m256i bits, Half) { return _mm512_cvtph_ps(bits); }
GRADCOMP_INLINE __m512 Widen(__m256i bits, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <typename Gradient>
GRADCOMP_INLINE __m512 Load(const Gradient* from) {
  return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), Gradient());
}
template <typename Gradient>
GRADCOMP_INLINE __m512 Load(const Gradient* from, __mmask16 lanes) {
  return Widen(_mm256_maskz_loadu_epi16(lanes, from), Gradient());
}

GRADCOMP_INLINE __mmask16 FirstLanes(int64_t count) {
  return static_cast<__mmask16>((1u << count) - 1);
}

GRADCOMP_INLINE __m512i Magnitude(__m512 values) {
  return _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff));
}

template <typename Gradient>
GRADCOMP_TARGET inline uint32_t BinMaximum(const float* residual, const Gradient* gradient,
                                           int64_t size) {
  __m512i maximum = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const __m512 accumulated = _mm512_add_ps(Load(residual + i), Load(gradient + i));
    maximum = _mm512_max_epu32(maximum, Magnitude(accumulated));
  }
  if (i < size) {
    const __mmask16 lanes = FirstLanes(size - i);
    const __m512 accumulated = _mm512_add_ps(Load(residual + i, lanes), Load(gradient + i, lanes));
    maximum = _mm512_max_epu32(maximum, Magnitude(accumulated));
  }
  return _mm512_reduce_max_epu32(maximum);
}

GRADCOMP_INLINE __mmask16 SentLanes(__m512 accumulated, __m512 boosted, __m512i maximum) {
  const __mmask16 reached = _mm512_cmpge_epu32_mask(Magnitude(boosted), maximum);
  return _mm512_mask_test_epi32_mask(reached, _mm512_castps_si512(accumulated),
                                     _mm512_set1_epi32(0x7fffffff));
}

GRADCOMP_INLINE void StoreCodes(__m512i codes, Code8* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
}
GRADCOMP_INLINE void StoreCodes(__m512i codes, Code16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(codes));
}

// Without a branch on what is sent: it is random, and few lanes of few vectors are.
template <typename Code>
GRADCOMP_INLINE Code* AppendCodes(__m512 accumulated, __mmask16 sent, __m512i indices, Code* codes) {
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(accumulated), 30);
  const __m512i negative = _mm512_and_si512(sign, _mm512_set1_epi32(kNegative));
  StoreCodes(_mm512_maskz_compress_epi32(sent, _mm512_or_si512(indices, negative)), codes);
  return codes + _mm_popcnt_u32(sent);
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* SelectBin(float* residual, const Gradient* gradient, int64_t size,
                                       float boost, uint32_t maximum, Code* codes) {
  const __m512 boosts = _mm512_set1_ps(boost);
  const __m512i maxima = _mm512_set1_epi32(static_cast<int>(maximum));
  __m512i indices = _mm512_slli_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 2);
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const __m512 g = Load(gradient + i);
    const __m512 accumulated = _mm512_add_ps(Load(residual + i), g);
    const __m512 boosted = _mm512_add_ps(accumulated, _mm512_mul_ps(boosts, g));
    _mm512_storeu_ps(residual + i, accumulated);
    codes = AppendCodes(accumulated, SentLanes(accumulated, boosted, maxima), indices, codes);
    indices = _mm512_add_epi32(indices, _mm512_set1_epi32(kWidth << 2));
  }
  if (i < size) {
    const __mmask16 lanes = FirstLanes(size - i);
    const __m512 g = Load(gradient + i, lanes);
    const __m512 accumulated = _mm512_add_ps(Load(residual + i, lanes), g);
    const __m512 boosted = _mm512_add_ps(accumulated, _mm512_mul_ps(boosts, g));
    _mm512_mask_storeu_ps(residual + i, lanes, accumulated);
    codes = AppendCodes(accumulated, SentLanes(accumulated, boosted, maxima), indices, codes);
  }
  return codes;
}

#include "scan_bins-inl.h"

}  // namespace

ScanBins FindScanBinsAvx512(GradientType type, int64_t bin_size) {
  return FindImpl(type, bin_size);
}

}  // namespace gradcomp

#endif  // GRADCOMP_X86
