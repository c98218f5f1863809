#include "floats.h"

#include <algorithm>

#include "simd.h"

namespace gradcomp {

namespace {

constexpr Vectorized LargestBits{[](const void* values, int64_t size) GRADCOMP_INLINED {
  const char* from = static_cast<const char*>(values);
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, sizeof bits);
    largest = std::max(largest, bits & ~kSignBit);
  }
  return largest;
}};

}  // namespace

float LargestMagnitude(const void* values, int64_t size) {
  return FromBits(LargestBits(values, size));
}

bool AllFinite(const void* values, int64_t size) {
  return IsFiniteMagnitude(LargestBits(values, size));
}

}  // namespace gradcomp
