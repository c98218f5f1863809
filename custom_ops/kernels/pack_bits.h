// Codes of 1 to 8 bits, packed: code i in the bits [i * bits, (i + 1) * bits), counted from the
// lowest bit of the first byte.
#pragma once

#include <cstdint>

#include "common.h"
#include "payload.h"

namespace gradcomp {

inline constexpr int kMaxCodeBits = 8;

inline int64_t PackedWords(int64_t num_codes, int bits) { return CeilDiv(num_codes * bits, 32); }

// A few codes on their way into a payload or out of it. A full chunk takes whole words, whatever the
// bits.
class CodeChunk {
 public:
  static constexpr int64_t kSize = 1024;

  uint8_t* codes() { return reinterpret_cast<uint8_t*>(eights_); }

  // Writes the first `num_codes` codes, with zeros behind the last one in its word. The codes are
  // gone then.
  void Pack(int64_t num_codes, int bits, int32_t* words);

  // Reads the first `num_codes` codes.
  void Unpack(const int32_t* words, int64_t num_codes, int bits);

 private:
  uint64_t eights_[kSize / 8];
};

// Whether the bits behind the last of `num_codes` codes are zeros.
Status CheckPadding(const int32_t* words, int64_t num_codes, int bits);

}  // namespace gradcomp
