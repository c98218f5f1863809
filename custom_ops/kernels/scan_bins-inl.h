// The part of ScanBins that is written once and compiled for each instruction set: the includer
// defines GRADCOMP_TARGET, and above the include, in its namespace,
//   BinMaximum(residual, gradient, size): the largest MagnitudeBits of residual + gradient
//   SelectBin(residual, gradient, size, boost, maximum, codes): stores residual + gradient,
//     appends the code of each element to be sent, and returns where the codes end.
// No include guard, for the target is a property of the functions.

inline bool IsZero(const float* values, int64_t size) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < size; ++i) bits |= ToBits(values[i]);
  return bits == 0;
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* ScanBin(float* residual, const Gradient* gradient, int64_t size,
                                     float boost, uint32_t maximum, Code* codes) {
  Code* end = codes;
  // A bin that was and stays zero (unused embedding rows) is read only.
  if (maximum != 0 || !IsZero(residual, size)) {
    end = SelectBin(residual, gradient, size, boost, maximum, codes);
  }
  if (end == codes) {
    *end++ = kEscape<Code>;
  } else {
    end[-1] |= kLastInBin;
  }
  return end;
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET uint8_t* ScanBinsImpl(const BinRun& run, uint8_t* bytes) {
  const Gradient* gradient = static_cast<const Gradient*>(run.gradient);
  Code* codes = reinterpret_cast<Code*>(bytes);
  float* bin_max = run.bin_max;
  for (int64_t begin = 0; begin < run.size; begin += run.bin_size) {
    const int64_t size = std::min(run.bin_size, run.size - begin);
    const uint32_t maximum = BinMaximum(run.residual + begin, gradient + begin, size);
    *bin_max++ = FromBits(maximum);
    if (!IsFiniteMagnitude(maximum)) continue;
    codes = ScanBin(run.residual + begin, gradient + begin, size, run.boost, maximum, codes);
  }
  return reinterpret_cast<uint8_t*>(codes);
}

template <typename Gradient>
ScanBins FindForGradient(int64_t bin_size) {
  return CodeBytes(bin_size) == 1 ? &ScanBinsImpl<Gradient, Code8>
                                  : &ScanBinsImpl<Gradient, Code16>;
}

inline ScanBins FindImpl(GradientType type, int64_t bin_size) {
  switch (type) {
    case GradientType::kFloat:
      return FindForGradient<float>(bin_size);
    case GradientType::kHalf:
      return FindForGradient<Half>(bin_size);
    case GradientType::kBFloat16:
      return FindForGradient<BFloat16>(bin_size);
  }
  return nullptr;
}
