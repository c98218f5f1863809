#include "scan_bins_variants.h"

#ifdef GRADCOMP_X86

#include <immintrin.h>

#include <algorithm>

#include "adacomp_codes.h"
#include "one_lane.h"

namespace gradcomp {
namespace {

// The target applies to functions, not to the file. Inline functions of the standard library that
// this file instantiates must run on any processor, because the linker may keep this copy of them.
#define GRADCOMP_TARGET __attribute__((target("avx2,f16c,bmi,popcnt")))
#define GRADCOMP_INLINE GRADCOMP_TARGET __attribute__((always_inline))

// For each set of lanes, the byte shuffle that moves their 16-bit codes to the front.
struct Shuffles {
  alignas(16) uint8_t bytes[256][16] = {};

  constexpr Shuffles() {
    for (int sent = 0; sent < 256; ++sent) {
      int to = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if ((sent >> lane & 1) == 0) continue;
        bytes[sent][to++] = 2 * lane;
        bytes[sent][to++] = 2 * lane + 1;
      }
    }
  }
};
constexpr Shuffles kShuffles;

struct Vector {
  static constexpr int64_t kWidth = 8;
  using Floats = __m256;
  using Words = __m256i;
  using Mask = __m256;

  GRADCOMP_INLINE static Floats Load(const float* from) { return _mm256_loadu_ps(from); }
  GRADCOMP_INLINE static Floats Load(const Half* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  GRADCOMP_INLINE static Floats Load(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  GRADCOMP_INLINE static void Store(Floats values, float* to) { _mm256_storeu_ps(to, values); }
  GRADCOMP_INLINE static Floats Broadcast(float value) { return _mm256_set1_ps(value); }
  GRADCOMP_INLINE static Words Broadcast(uint32_t value) {
    return _mm256_set1_epi32(static_cast<int>(value));
  }

  GRADCOMP_INLINE static Words Magnitude(Floats values) {
    return _mm256_and_si256(_mm256_castps_si256(values), Broadcast(~kSignBit));
  }
  // Signed comparisons are correct, because magnitudes are below 2^31.
  GRADCOMP_INLINE static Words Max(Words a, Words b) { return _mm256_max_epi32(a, b); }
  GRADCOMP_INLINE static uint32_t LargestLane(Words lanes) {
    __m128i half =
        _mm_max_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
  }

  GRADCOMP_INLINE static Mask Sent(Floats accumulated, Floats boosted, Words bin_max) {
    const __m256i below = _mm256_cmpgt_epi32(bin_max, Magnitude(boosted));
    const __m256 not_zero = _mm256_cmp_ps(accumulated, _mm256_setzero_ps(), _CMP_NEQ_UQ);
    return _mm256_andnot_ps(_mm256_castsi256_ps(below), not_zero);
  }
  GRADCOMP_INLINE static uint32_t Bits(Mask sent) {
    return static_cast<uint32_t>(_mm256_movemask_ps(sent));
  }
  GRADCOMP_INLINE static Floats Subtract(Floats accumulated, Floats scale, Mask sent) {
    const Floats sign = _mm256_and_ps(accumulated, _mm256_castsi256_ps(Broadcast(kSignBit)));
    return _mm256_sub_ps(accumulated, _mm256_and_ps(_mm256_or_ps(scale, sign), sent));
  }

  // Has no branch on the sent lanes, because they are random.
  template <typename Code>
  GRADCOMP_INLINE static Code* Append(Floats accumulated, uint32_t sent, int64_t first,
                                      Code* codes) {
    const Words lanes = _mm256_add_epi32(_mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0),
                                         Broadcast(static_cast<uint32_t>(first << 2)));
    const Words sign = _mm256_srli_epi32(_mm256_castps_si256(accumulated), 30);
    const Words code = _mm256_or_si256(lanes, _mm256_and_si256(sign, Broadcast(kNegative)));
    const __m128i short_code =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    const __m128i shuffle =
        _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffles.bytes[sent]));
    StoreCodes(_mm_shuffle_epi8(short_code, shuffle), codes);
    return codes + _mm_popcnt_u32(sent);
  }

 private:
  GRADCOMP_INLINE static void StoreCodes(__m128i codes, Code8* to) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(codes, codes));
  }
  GRADCOMP_INLINE static void StoreCodes(__m128i codes, Code16* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
  }
};

#include "scan_bins-inl.h"

}  // namespace

BinKernels Avx2BinKernels(GradientType type, int64_t bin_size) { return KernelsOf(type, bin_size); }

}  // namespace gradcomp

#endif  // GRADCOMP_X86
