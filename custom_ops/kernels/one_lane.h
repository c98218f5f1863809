// A vector of one element, for the portable variant and for bins shorter than a vector. This class
// has the members that scan_bins-inl.h requires of a vector.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adacomp_codes.h"
#include "floats.h"

namespace gradcomp {

// AdaComp's selection. An element is sent if it is not zero, and reaches its bin's maximum with the
// latest gradient counted again.
inline bool IsSent(float accumulated, float boosted, uint32_t bin_max) {
  return MagnitudeBits(boosted) >= bin_max && MagnitudeBits(accumulated) != 0;
}

struct OneLane {
  static constexpr int64_t kWidth = 1;
  using Floats = float;
  using Words = uint32_t;
  using Mask = bool;

  template <typename Number>
  static Floats Load(const Number* from) {
    return ToFloat(*from);
  }
  static void Store(Floats values, float* to) { *to = values; }
  static Floats Broadcast(float value) { return value; }
  static Words Broadcast(uint32_t value) { return value; }

  static Words Magnitude(Floats values) { return MagnitudeBits(values); }
  static Words Max(Words a, Words b) { return std::max(a, b); }
  static uint32_t LargestLane(Words lanes) { return lanes; }

  static Mask Sent(Floats accumulated, Floats boosted, Words bin_max) {
    return IsSent(accumulated, boosted, bin_max);
  }
  static uint32_t Bits(Mask sent) { return sent; }  // lane i is bit i

  // Subtracts the scale, with the element's sign, from sent elements.
  static Floats Subtract(Floats accumulated, Floats scale, Mask sent) {
    const uint32_t sign = ToBits(accumulated) & kSignBit;
    return accumulated - FromBits(sent ? ToBits(scale) | sign : 0);
  }

  // Appends the codes of the sent lanes; lane i is element first + i of its bin.
  template <typename Code>
  static Code* Append(Floats accumulated, uint32_t sent, int64_t first, Code* codes) {
    *codes = static_cast<Code>(first << 2 | (ToBits(accumulated) >> 30 & kNegative));
    return codes + sent;
  }
};

}  // namespace gradcomp
