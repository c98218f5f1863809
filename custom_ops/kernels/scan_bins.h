// AdaComp's two passes over memory, for several instruction sets.
#pragma once

#include <cstdint>

#include "floats.h"
#include "simd.h"

namespace gradcomp {

// Consecutive whole bins of one tensor. The last bin may be short.
struct BinRun {
  const float* residual;
  const void* gradient;
  float* to;  // the memory of the residual or of the gradient
  int64_t size;  // elements
  int64_t bin_size;
  float* bin_max;  // one per bin
};

struct SendSettings {
  float boost;  // scale factor - 1
  float scale;  // the magnitude sent for each selected element
};

inline constexpr int64_t kCodeSlack = 16;  // vectors of codes are stored whole

// All variants give the same bits.
struct BinKernels {
  // Writes the largest magnitude of residual + gradient of each bin: infinity or NaN if the bin is
  // not finite.
  void (*find_maxima)(const BinRun& run);

  // Writes residual + gradient without the sent values, selects elements by the maxima, appends
  // their codes, and returns the end of the codes. `codes` has room for size + kCodeSlack codes.
  uint8_t* (*send)(const BinRun& run, const SendSettings& settings, uint8_t* codes);
};

BinKernels FindBinKernels(Simd simd, GradientType type, int64_t bin_size);

}  // namespace gradcomp
