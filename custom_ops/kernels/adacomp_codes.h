// AdaComp's self-delimiting codes: in-bin index << 2 | negative << 1 | last in its bin, in 8 bits for
// bins of up to 63 elements and in 16 bits above. Layout: docs/payload_format.md.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_ADACOMP_CODES_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_ADACOMP_CODES_H_

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

// Adds scale * sign of each code to its element. The codes must have been checked.
// Returns where the codes of `num_bins` bins end.
template <typename Code>
const uint8_t* AddCodes(const uint8_t* codes, int64_t num_bins, int64_t bin_size, float scale,
                        float* values) {
  const uint32_t scale_bits = ToBits(scale);
  for (int64_t bin = 0; bin < num_bins; codes += sizeof(Code)) {
    const uint32_t code = LoadCode<Code>(codes, 0);
    const uint32_t index = code >> 2;
    if (index != kEscapeIndex<Code>) {
      values[index] += FromBits(scale_bits ^ (code & kNegative) << 30);
    }
    const int64_t last = code & kLastInBin;
    bin += last;
    values += last ? bin_size : 0;
  }
  return codes;
}

inline const uint8_t* AddCodes(const uint8_t* codes, int64_t num_bins, int64_t bin_size,
                               float scale, float* values) {
  return CodeBytes(bin_size) == 1
             ? AddCodes<Code8>(codes, num_bins, bin_size, scale, values)
             : AddCodes<Code16>(codes, num_bins, bin_size, scale, values);
}

// The last word is filled up with zeros, and no word is added.
template <typename Code>
Status CheckPadding(const uint8_t* codes, int64_t next, int64_t num_codes) {
  if (num_codes - next >= int64_t{4 / sizeof(Code)}) {
    return {Concat(num_codes, " codes; expected ", next)};
  }
  for (; next < num_codes; ++next) {
    if (LoadCode<Code>(codes, next) != 0) return {"the last word is not filled up with zeros"};
  }
  return {};
}

// Walks untrusted codes of a tensor of `size` elements in `code_words` words, checks all of them,
// and notes in starts[i] at which byte the codes of bin i * bins_per_block begin.
template <typename Code>
Status IndexCodes(const uint8_t* codes, int64_t code_words, int64_t size, int64_t bin_size,
                  int64_t bins_per_block, int64_t* starts) {
  const int64_t num_bins = CeilDiv(size, bin_size);
  const int64_t num_codes = code_words * int64_t{4 / sizeof(Code)};
  int64_t next = 0;
  for (int64_t bin = 0; bin < num_bins; ++bin) {
    if (bin % bins_per_block == 0) starts[bin / bins_per_block] = next * int64_t{sizeof(Code)};
    const int64_t length = std::min(bin_size, size - bin * bin_size);
    int64_t previous = -1;
    for (bool last = false; !last; ++next) {
      if (next == num_codes) {
        return {Concat("the codes end in bin ", bin, "; expected ", num_bins, " bins")};
      }
      const uint32_t code = LoadCode<Code>(codes, next);
      const int64_t index = code >> 2;
      const bool empty_bin = code == kEscape<Code> && previous < 0;
      if (!empty_bin && (index >= length || index <= previous)) {
        return {Concat("index ", index, " in bin ", bin, "; expected one above ", previous,
                       " and below ", length, ", the number of elements in the bin")};
      }
      previous = index;
      last = code & kLastInBin;
    }
  }
  return CheckPadding<Code>(codes, next, num_codes);
}

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_ADACOMP_CODES_H_
