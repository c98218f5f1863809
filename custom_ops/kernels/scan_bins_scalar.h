// One element at a time: the portable variant, and the ends of bins in the others.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_SCALAR_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_SCALAR_H_

#include <algorithm>
#include <cstdint>

#include "adacomp_codes.h"
#include "floats.h"

namespace gradcomp {

// AdaComp's selection: an element is sent if it reaches its bin's maximum once the latest gradient
// is counted again, and has a sign.
inline bool IsSent(float accumulated, float boosted, uint32_t bin_max) {
  return MagnitudeBits(boosted) >= bin_max && MagnitudeBits(accumulated) != 0;
}

// A bin that is not finite must not be written. One that was and stays zero (unused rows of an
// embedding) need not be.
inline bool IsLeftAlone(uint32_t maximum, const float* residual, int64_t size) {
  if (maximum != 0) return !IsFiniteMagnitude(maximum);
  uint32_t bits = 0;
  for (int64_t i = 0; i < size; ++i) bits |= ToBits(residual[i]);
  return bits == 0;
}

// Far enough ahead that memory is busy while a bin is computed on.
template <typename Gradient>
inline void Prefetch(const float* residual, const Gradient* gradient) {
  constexpr int64_t kAhead = 1024;  // elements
  __builtin_prefetch(residual + kAhead, 1);
  __builtin_prefetch(gradient + kAhead, 0);
}

template <typename Gradient>
inline uint32_t ScalarMaximum(const float* residual, const Gradient* gradient, int64_t begin,
                              int64_t end, uint32_t maximum) {
  for (int64_t i = begin; i < end; ++i) {
    maximum = std::max(maximum, MagnitudeBits(residual[i] + ToFloat(gradient[i])));
  }
  return maximum;
}

template <typename Gradient, typename Code>
inline Code* ScalarSelect(float* residual, const Gradient* gradient, int64_t begin, int64_t end,
                          float boost, uint32_t maximum, Code* codes) {
  for (int64_t i = begin; i < end; ++i) {
    const float g = ToFloat(gradient[i]);
    const float accumulated = residual[i] + g;
    const float boosted = accumulated + boost * g;
    residual[i] = accumulated;
    *codes = static_cast<Code>(i << 2 | (ToBits(accumulated) >> 30 & kNegative));
    codes += IsSent(accumulated, boosted, maximum);
  }
  return codes;
}

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_SCAN_BINS_SCALAR_H_
