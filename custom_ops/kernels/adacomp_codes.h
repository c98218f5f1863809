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

// What a code stands for, and where.
struct SentValue {
  float* place;
  float value;
};

// Goes through the codes of `num_bins` bins. They must have been checked.
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

 private:
  const uint8_t* codes_;
  int64_t bins_left_;
  const int64_t bin_size_;
  const uint32_t scale_bits_;
  float* values_;
};

// Adds scale * sign of each code to its element.
template <typename Code>
void AddCodes(CodeReader<Code> reader) {
  while (!reader.done()) {
    SentValue sent;
    if (reader.Next(&sent)) *sent.place += sent.value;
  }
}

// The same for codes far apart, each of which is a cache miss: reads ahead of adding.
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
// and notes in starts[i] at which byte the codes of bin i * bins_per_block begin. Which code is the
// last of its bin is random, and so there is no branch on it.
template <typename Code>
Status IndexCodes(const uint8_t* codes, int64_t code_words, int64_t size, int64_t bin_size,
                  int64_t bins_per_block, int64_t* starts) {
  const int64_t num_bins = CeilDiv(size, bin_size);
  const int64_t num_codes = code_words * int64_t{4 / sizeof(Code)};
  const int64_t last_length = size - (num_bins - 1) * bin_size;
  int64_t next = 0;
  int64_t previous = -1;  // index in the same bin
  for (int64_t bin = 0, block_begin = 0; bin < num_bins; ++next) {
    if (bin == block_begin) {
      *starts++ = next * int64_t{sizeof(Code)};
      block_begin += bins_per_block;
    }
    if (next == num_codes) {
      return {Concat("the codes end in bin ", bin, "; expected ", num_bins, " bins")};
    }
    const uint32_t code = LoadCode<Code>(codes, next);
    const int64_t index = code >> 2;
    const int64_t length = bin + 1 < num_bins ? bin_size : last_length;
    if (index >= length || index <= previous) {
      const bool empty_bin = code == kEscape<Code> && previous < 0;
      if (!empty_bin) {
        return {Concat("index ", index, " in bin ", bin, "; expected one above ", previous,
                       " and below ", length, ", the number of elements in the bin")};
      }
    }
    const int64_t last = code & kLastInBin;
    previous = index | -last;
    bin += last;
  }
  return CheckPadding<Code>(codes, next, num_codes);
}

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_ADACOMP_CODES_H_
