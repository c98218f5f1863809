#include "floats.h"

#include <algorithm>

#include "common.h"

namespace gradcomp {

GRADCOMP_VARIANTS float LargestMagnitude(const void* values, int64_t size) {
  const char* from = static_cast<const char*>(values);
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, sizeof bits);
    largest = std::max(largest, bits & ~kSignBit);
  }
  return FromBits(largest);
}

bool AllFinite(const void* values, int64_t size) {
  return IsFiniteMagnitude(MagnitudeBits(LargestMagnitude(values, size)));
}

}  // namespace gradcomp
