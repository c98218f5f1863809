// Packs codes of 1 to 8 bits. Code i has the bits [i * bits, (i + 1) * bits), counted from the
// lowest bit of the first byte.
#pragma once

#include <cstdint>

#include "common.h"
#include "payload.h"

namespace gradcomp {

inline constexpr int kMaxCodeBits = 8;

inline int64_t PackedWords(int64_t num_codes, int bits) { return CeilDiv(num_codes * bits, 32); }

// A buffer for codes that are packed into a payload, or unpacked from it. A full chunk takes whole
// words for any number of bits.
class CodeChunk {
 public:
  static constexpr int64_t kSize = 1024;

  uint8_t* codes() { return reinterpret_cast<uint8_t*>(eights_); }

  // Writes the first `num_codes` codes, and zeros in the rest of the last word. Destroys the codes.
  void Pack(int64_t num_codes, int bits, int32_t* words);

  // Reads the first `num_codes` codes.
  void Unpack(const int32_t* words, int64_t num_codes, int bits);

 private:
  uint64_t eights_[kSize / 8];
};

// Checks that the bits after the last of `num_codes` codes are zeros.
Status CheckPadding(const int32_t* words, int64_t num_codes, int bits);

}  // namespace gradcomp
