#include "scan_bins_variants.h"

#ifdef GRADCOMP_X86

#include <immintrin.h>

#include <algorithm>

#include "adacomp_codes.h"
#include "scan_bins_scalar.h"

namespace gradcomp {
namespace {

// On the functions, not on the file: inline functions of the standard library that this file
// instantiates must run on any processor, for the linker may keep this copy of them.
#define GRADCOMP_TARGET __attribute__((target("avx2,f16c,bmi,popcnt")))
#define GRADCOMP_INLINE GRADCOMP_TARGET inline __attribute__((always_inline))

constexpr int64_t kWidth = 8;

GRADCOMP_INLINE __m256 Load(const float* from) { return _mm256_loadu_ps(from); }
GRADCOMP_INLINE __m256 Load(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
GRADCOMP_INLINE __m256 Load(const BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

GRADCOMP_INLINE __m256i Magnitude(__m256 values) {
  return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7fffffff));
}

GRADCOMP_INLINE uint32_t LargestLane(__m256i lanes) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

template <typename Gradient>
GRADCOMP_TARGET inline uint32_t BinMaximum(const float* residual, const Gradient* gradient,
                                           int64_t size) {
  __m256i maximum = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const __m256 accumulated = _mm256_add_ps(Load(residual + i), Load(gradient + i));
    maximum = _mm256_max_epi32(maximum, Magnitude(accumulated));
  }
  return ScalarMaximum(residual, gradient, i, size, LargestLane(maximum));
}

// One bit per lane that is sent. Magnitudes are below 2^31, so a signed comparison will do.
GRADCOMP_INLINE uint32_t SentLanes(__m256 accumulated, __m256 boosted, __m256i maximum) {
  const __m256i below = _mm256_cmpgt_epi32(maximum, Magnitude(boosted));
  const __m256i zero = _mm256_cmpeq_epi32(Magnitude(accumulated), _mm256_setzero_si256());
  const __m256i kept = _mm256_or_si256(below, zero);
  return static_cast<uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(kept)));
}

// For each set of lanes, the byte shuffle that moves their 16-bit codes to the front.
struct Shuffles {
  alignas(16) uint8_t bytes[256][16] = {};

  constexpr Shuffles() {
    for (int sent = 0; sent < 256; ++sent) {
      int to = 0;
      for (int lane = 0; lane < kWidth; ++lane) {
        if ((sent >> lane & 1) == 0) continue;
        bytes[sent][to++] = 2 * lane;
        bytes[sent][to++] = 2 * lane + 1;
      }
    }
  }
};
constexpr Shuffles kShuffles;

GRADCOMP_INLINE void StoreCodes(__m128i codes, Code8* to) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(codes, codes));
}
GRADCOMP_INLINE void StoreCodes(__m128i codes, Code16* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
}

// Appends the codes of the sent lanes without a branch on which lanes are sent, because that is
// random.
template <typename Code>
GRADCOMP_INLINE Code* AppendCodes(__m256 accumulated, uint32_t sent, int64_t first, Code* codes) {
  const __m256i lanes = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0),
                                         _mm256_set1_epi32(static_cast<int>(first)));
  const __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(accumulated), 30);
  const __m256i negative = _mm256_and_si256(sign, _mm256_set1_epi32(kNegative));
  const __m256i code = _mm256_or_si256(_mm256_slli_epi32(lanes, 2), negative);
  const __m128i short_code =
      _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  const __m128i shuffle =
      _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffles.bytes[sent]));
  StoreCodes(_mm_shuffle_epi8(short_code, shuffle), codes);
  return codes + _mm_popcnt_u32(sent);
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* SelectBin(float* residual, const Gradient* gradient, int64_t size,
                                       float boost, uint32_t maximum, Code* codes) {
  const __m256 boosts = _mm256_set1_ps(boost);
  const __m256i maxima = _mm256_set1_epi32(static_cast<int>(maximum));
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    Prefetch(residual + i, gradient + i);
    const __m256 g = Load(gradient + i);
    const __m256 accumulated = _mm256_add_ps(Load(residual + i), g);
    const __m256 boosted = _mm256_add_ps(accumulated, _mm256_mul_ps(boosts, g));
    _mm256_storeu_ps(residual + i, accumulated);
    codes = AppendCodes(accumulated, SentLanes(accumulated, boosted, maxima), i, codes);
  }
  return ScalarSelect(residual, gradient, i, size, boost, maximum, codes);
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* ScanBin(float* residual, const Gradient* gradient, int64_t size,
                                     float boost, uint32_t* maximum, Code* codes) {
  *maximum = BinMaximum(residual, gradient, size);
  if (IsLeftAlone(*maximum, residual, size)) return codes;
  return SelectBin(residual, gradient, size, boost, *maximum, codes);
}

#include "scan_bins-inl.h"

}  // namespace

ScanBins FindScanBinsAvx2(GradientType type, int64_t bin_size) { return FindImpl(type, bin_size); }

}  // namespace gradcomp

#endif  // GRADCOMP_X86
