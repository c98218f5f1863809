// AdaComp's self-delimiting codes: in-bin index << 2 | negative << 1 | last in its bin, in 8 bits for
// bins of up to 63 elements and in 16 bits above. Layout: docs/payload_format.md.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "floats.h"

namespace gradcomp {

inline constexpr int64_t kMaxBinSize8 = 63;
inline constexpr int64_t kMaxBinSize = 16383;

using Code8 = uint8_t;
using Code16 = uint16_t;

inline int64_t CodeBytes(int64_t bin_size) {
  return bin_size <= kMaxBinSize8 ? sizeof(Code8) : sizeof(Code16);
}

inline constexpr uint32_t kNegative = 2;
inline constexpr uint32_t kLastInBin = 1;

// The index that no element has. Alone in its bin, it says that the bin sends nothing.
template <typename Code>
inline constexpr uint32_t kEscapeIndex = sizeof(Code) == 1 ? 63 : 16383;
template <typename Code>
inline constexpr Code kEscape = kEscapeIndex<Code> << 2 | kLastInBin;

template <typename Code>
Code LoadCode(const uint8_t* codes, int64_t i) {
  Code code;
  std::memcpy(&code, codes + i * int64_t{sizeof(Code)}, sizeof code);
  return code;
}

// The value that a code represents, and its position.
struct SentValue {
  float* place;
  float value;
};

// Reads the codes of `num_bins` bins, which must be checked before.
template <typename Code>
class CodeReader {
 public:
  CodeReader(const uint8_t* codes, int64_t num_bins, int64_t bin_size, float scale, float* values)
      : codes_(codes),
        bins_left_(num_bins),
        bin_size_(bin_size),
        scale_bits_(ToBits(scale)),
        values_(values) {}

  bool done() const { return bins_left_ <= 0; }

  // Reads a code, and returns whether it stands for a value: an empty bin's does not.
  bool Next(SentValue* sent) {
    const uint32_t code = LoadCode<Code>(codes_, 0);
    codes_ += sizeof(Code);
    const uint32_t index = code >> 2;
    *sent = {values_ + index, FromBits(scale_bits_ ^ (code & kNegative) << 30)};
    const int64_t last = code & kLastInBin;
    bins_left_ -= last;
    values_ += bin_size_ & -last;  // no branch: which code is the last is random
    return index != kEscapeIndex<Code>;
  }

  // Adds the elements of the next eight codes, unless fewer may be left or a code marks an empty bin.
  // Returns whether the elements were added.
  bool AddEight() {
    static_assert(sizeof(Code) == 1);
#if defined(__x86_64__)
    constexpr uint64_t kEach = 0x0101010101010101u;  // times a byte: that byte, eight times
    if (bins_left_ < 8) return false;                // each has at least a code
    uint64_t codes;
    std::memcpy(&codes, codes_, sizeof codes);
    const uint64_t zero_if_escape = codes ^ kEach * kEscape<Code>;
    if ((zero_if_escape - kEach) & ~zero_if_escape & kEach << 7) return false;
    const uint64_t ended = (codes & kEach * kLastInBin) * kEach;  // bins, with each code
    const uint64_t ended_before = ended << 8;

    const __m128i zero = _mm_setzero_si128();
    const auto widened = [zero](uint64_t bytes) {
      return _mm_unpacklo_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)), zero);
    };
    const __m128i bin_size = _mm_set1_epi16(static_cast<int16_t>(bin_size_));
    const __m128i signs = _mm_slli_epi16(widened(codes & kEach * kNegative), 14);
    const __m128i scale = _mm_set1_epi32(static_cast<int32_t>(scale_bits_));
    alignas(16) uint16_t places[8];
    alignas(16) float values[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(places),
                    _mm_add_epi16(widened(codes >> 2 & kEach * kEscapeIndex<Code>),
                                  _mm_mullo_epi16(widened(ended_before), bin_size)));
    _mm_store_si128(reinterpret_cast<__m128i*>(values),
                    _mm_xor_si128(scale, _mm_unpacklo_epi16(zero, signs)));
    _mm_store_si128(reinterpret_cast<__m128i*>(values + 4),
                    _mm_xor_si128(scale, _mm_unpackhi_epi16(zero, signs)));
    for (int i = 0; i < 8; ++i) values_[places[i]] += values[i];
    codes_ += sizeof codes;
    bins_left_ -= ended >> 56;
    values_ += bin_size_ * (ended >> 56);
    return true;
#else
    return false;
#endif
  }

 private:
  const uint8_t* codes_;
  int64_t bins_left_;
  const int64_t bin_size_;
  const uint32_t scale_bits_;
  float* values_;
};

// Adds scale * sign of each code to its element.
inline void AddCodes(CodeReader<Code8> reader) {
  while (!reader.done()) {
    if (reader.AddEight()) continue;
    for (int i = 0; i < 8 && !reader.done(); ++i) {
      SentValue sent;
      if (reader.Next(&sent)) *sent.place += sent.value;
    }
  }
}

// Does the same for codes far apart, each of which is a cache miss: reads ahead of adding.
template <typename Code>
void AddSparseCodes(CodeReader<Code> reader) {
  constexpr int kBatch = 64;
  SentValue batches[2][kBatch + 1];
  int sizes[2] = {0, 0};
  for (int now = 0; sizes[1 - now] > 0 || !reader.done(); now = 1 - now) {
    int size = 0;
    while (size < kBatch && !reader.done()) {
      SentValue* sent = &batches[now][size];
      size += reader.Next(sent);
      __builtin_prefetch(sent->place, 1);
    }
    sizes[now] = size;
    for (int i = 0; i < sizes[1 - now]; ++i) {
      *batches[1 - now][i].place += batches[1 - now][i].value;
    }
    sizes[1 - now] = 0;
  }
}

inline void AddCodes(const uint8_t* codes, int64_t num_bins, int64_t bin_size, float scale,
                     float* values) {
  if (CodeBytes(bin_size) == 1) {
    AddCodes(CodeReader<Code8>(codes, num_bins, bin_size, scale, values));
  } else {
    AddSparseCodes(CodeReader<Code16>(codes, num_bins, bin_size, scale, values));
  }
}

// Untrusted codes for some bins of a tensor; the last bin may be short.
struct CodeSpan {
  const uint8_t* codes;
  int64_t num_codes;
  int64_t num_bins;
  int64_t bin_size;
  int64_t last_bin_size;
};

// Whether a code may follow the one before it, as 1 or 0: of the codes' own type and without
// branches, so that compilers make vector instructions of it.
template <typename Code>
Code MayFollow(Code previous, Code code, Code bin_size) {
  const Code index = code >> 2;
  const Code previous_index = previous >> 2;
  const Code first = previous & kLastInBin;
  const Code ascends = index > previous_index;
  const Code in_bin = index < bin_size;
  const Code escape = code == kEscape<Code>;
  return ((ascends | first) & in_bin) | (first & escape);
}

// Whether all codes are good. Compilers make vector instructions of its inner loop, which they can't
// of a walk from bin to bin.
template <typename Code>
bool AreGood(const CodeSpan& span) {
  constexpr int64_t kChunk = 128;  // few enough for `ends`
  const Code bin_size = static_cast<Code>(span.bin_size);
  Code previous = kLastInBin;
  int64_t num_bins = 0;
  bool good = true;
  for (int64_t begin = 0; begin < span.num_codes && good; begin += kChunk) {
    const int64_t size = std::min(kChunk, span.num_codes - begin);
    Code codes[1 + kChunk];
    codes[0] = previous;
    std::memcpy(codes + 1, span.codes + begin * sizeof(Code), size * sizeof(Code));
    Code ends = 0;
    Code all_good = 1;
    for (int64_t i = 0; i < size; ++i) {
      all_good &= MayFollow(codes[i], codes[i + 1], bin_size);
      ends += codes[i + 1] & kLastInBin;
    }
    previous = codes[size];
    num_bins += ends;
    good = all_good;
  }
  // In a short last bin, too, the last index is the largest.
  const bool ends_well = previous == kEscape<Code> || previous >> 2 < span.last_bin_size;
  return good && ends_well && (previous & kLastInBin) && num_bins == span.num_bins;
}

// Walks the codes and describes the first that no encoder writes.
template <typename Code>
Status FindBadCode(const CodeSpan& span, int64_t first_bin) {
  Code previous = kLastInBin;
  int64_t next = 0;
  for (int64_t bin = 0; bin < span.num_bins; bin += previous & kLastInBin) {
    if (next == span.num_codes) {
      return {Concat("the codes end in bin ", first_bin + bin, "; expected those of ",
                     span.num_bins, " bins from bin ", first_bin)};
    }
    const Code code = LoadCode<Code>(span.codes, next++);
    const int64_t size = bin + 1 < span.num_bins ? span.bin_size : span.last_bin_size;
    if (!MayFollow(previous, code, static_cast<Code>(size))) {
      const int64_t above = previous & kLastInBin ? -1 : previous >> 2;
      return {Concat("index ", code >> 2, " in bin ", first_bin + bin, "; expected one above ",
                     above, " and below ", size, ", the number of elements in the bin")};
    }
    previous = code;
  }
  if (next == span.num_codes) return {};
  return {Concat(span.num_codes, " codes from bin ", first_bin, "; expected ", next)};
}

// Checks all codes of a span that begins with bin `first_bin` of its tensor.
template <typename Code>
Status CheckCodes(const CodeSpan& span, int64_t first_bin) {
  return AreGood<Code>(span) ? Status() : FindBadCode<Code>(span, first_bin);
}

}  // namespace gradcomp
