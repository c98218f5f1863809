#include "scan_bins_variants.h"

#ifdef GRADCOMP_X86

#ifndef __clang__  // gcc 12 warns of its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
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

GRADCOMP_INLINE __m512i Magnitude(__m512 values) {
  return _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff));
}

GRADCOMP_INLINE __m512i Iota(int64_t first) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)));
}

GRADCOMP_INLINE void StoreCodes(__m512i codes, Code8* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
}
GRADCOMP_INLINE void StoreCodes(__m512i codes, Code16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(codes));
}

// Appends the codes of the lanes that reach the maximum, without a branch on which do: it is
// random, and few lanes of few vectors do.
template <typename Code>
GRADCOMP_INLINE Code* AppendCodes(__m512 accumulated, __m512 gradient, __m512 boost,
                                  __m512i maximum, __mmask16 lanes, int64_t first, Code* codes) {
  const __m512 boosted = _mm512_add_ps(accumulated, _mm512_mul_ps(boost, gradient));
  const __mmask16 reached = _mm512_mask_cmpge_epu32_mask(lanes, Magnitude(boosted), maximum);
  const __mmask16 sent = _mm512_mask_test_epi32_mask(reached, _mm512_castps_si512(accumulated),
                                                     _mm512_set1_epi32(0x7fffffff));
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(accumulated), 30);
  const __m512i negative = _mm512_and_si512(sign, _mm512_set1_epi32(kNegative));
  const __m512i code = _mm512_or_si512(_mm512_slli_epi32(Iota(first), 2), negative);
  StoreCodes(_mm512_maskz_compress_epi32(sent, code), codes);
  return codes + _mm_popcnt_u32(sent);
}

constexpr __mmask16 kAllLanes = 0xffff;

// Less than a vector.
template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* ScanTinyBin(float* residual, const Gradient* gradient, int64_t size,
                                         float boost, uint32_t* maximum, Code* codes) {
  const __mmask16 lanes = static_cast<__mmask16>((1u << size) - 1);
  const __m512 g = Load(gradient, lanes);
  const __m512 accumulated = _mm512_add_ps(Load(residual, lanes), g);
  *maximum = _mm512_reduce_max_epu32(Magnitude(accumulated));
  if (IsLeftAlone(*maximum, residual, size)) return codes;
  _mm512_mask_storeu_ps(residual, lanes, accumulated);
  return AppendCodes(accumulated, g, _mm512_set1_ps(boost),
                     _mm512_set1_epi32(static_cast<int>(*maximum)), lanes, 0, codes);
}

// The last vector of a bin ends with the bin and overlaps the one before, so that no vector is
// partial: a masked store at the end of a bin would hold up the loads of the next. These are its
// lanes that no vector before has.
GRADCOMP_INLINE __mmask16 NewLanes(int64_t size) {
  return static_cast<__mmask16>(kAllLanes << (CeilDiv(size, kWidth) * kWidth - size));
}

// A bin of kVectors vectors, which stay in registers.
template <int kVectors, typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* ScanSmallBin(float* residual, const Gradient* gradient, int64_t size,
                                          float boost, uint32_t* maximum, Code* codes) {
  const int64_t last = size - kWidth;
  __m512 g[kVectors];
  __m512 accumulated[kVectors];
  __m512i maxima = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const int64_t first = i + 1 < kVectors ? i * kWidth : last;
    Prefetch(residual + first, gradient + first);
    g[i] = Load(gradient + first);
    accumulated[i] = _mm512_add_ps(Load(residual + first), g[i]);
    maxima = _mm512_max_epu32(maxima, Magnitude(accumulated[i]));
  }
  *maximum = _mm512_reduce_max_epu32(maxima);
  if (IsLeftAlone(*maximum, residual, size)) return codes;
  const __m512 boosts = _mm512_set1_ps(boost);
  maxima = _mm512_set1_epi32(static_cast<int>(*maximum));
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const int64_t first = i + 1 < kVectors ? i * kWidth : last;
    const __mmask16 lanes = i + 1 < kVectors ? kAllLanes : NewLanes(size);
    _mm512_storeu_ps(residual + first, accumulated[i]);
    codes = AppendCodes(accumulated[i], g[i], boosts, maxima, lanes, first, codes);
  }
  return codes;
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* ScanLargeBin(float* residual, const Gradient* gradient, int64_t size,
                                          float boost, uint32_t* maximum, Code* codes) {
  const int64_t last = size - kWidth;
  const __m512 last_g = Load(gradient + last);
  const __m512 last_accumulated = _mm512_add_ps(Load(residual + last), last_g);
  __m512i maxima = Magnitude(last_accumulated);
  for (int64_t i = 0; i < last; i += kWidth) {
    const __m512 accumulated = _mm512_add_ps(Load(residual + i), Load(gradient + i));
    maxima = _mm512_max_epu32(maxima, Magnitude(accumulated));
  }
  *maximum = _mm512_reduce_max_epu32(maxima);
  if (IsLeftAlone(*maximum, residual, size)) return codes;
  const __m512 boosts = _mm512_set1_ps(boost);
  maxima = _mm512_set1_epi32(static_cast<int>(*maximum));
  for (int64_t i = 0; i < last; i += kWidth) {
    Prefetch(residual + i, gradient + i);
    const __m512 g = Load(gradient + i);
    const __m512 accumulated = _mm512_add_ps(Load(residual + i), g);
    _mm512_storeu_ps(residual + i, accumulated);
    codes = AppendCodes(accumulated, g, boosts, maxima, kAllLanes, i, codes);
  }
  _mm512_storeu_ps(residual + last, last_accumulated);
  return AppendCodes(last_accumulated, last_g, boosts, maxima, NewLanes(size), last, codes);
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* ScanBin(float* residual, const Gradient* gradient, int64_t size,
                                     float boost, uint32_t* maximum, Code* codes) {
  switch (CeilDiv(size, kWidth)) {
    case 1:
      if (size < kWidth) return ScanTinyBin(residual, gradient, size, boost, maximum, codes);
      return ScanSmallBin<1>(residual, gradient, size, boost, maximum, codes);
    case 2:
      return ScanSmallBin<2>(residual, gradient, size, boost, maximum, codes);
    case 3:
      return ScanSmallBin<3>(residual, gradient, size, boost, maximum, codes);
    case 4:
      return ScanSmallBin<4>(residual, gradient, size, boost, maximum, codes);
    default:
      return ScanLargeBin(residual, gradient, size, boost, maximum, codes);
  }
}

#include "scan_bins-inl.h"

}  // namespace

ScanBins FindScanBinsAvx512(GradientType type, int64_t bin_size) {
  return FindImpl(type, bin_size);
}

}  // namespace gradcomp

#endif  // GRADCOMP_X86
