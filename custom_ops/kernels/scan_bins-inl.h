// The part of ScanBins that is written once and compiled for each instruction set. The includer
// defines GRADCOMP_TARGET, and above the include, in its namespace,
//   Code* ScanBin(float* residual, const Gradient* gradient, int64_t size, float boost,
//                 uint32_t* maximum, Code* codes)
// which does one bin: it finds the largest MagnitudeBits of residual + gradient and, unless
// IsLeftAlone, stores residual + gradient and appends the codes of what is to be sent.
// No include guard, for the target is a property of the functions.

template <typename Gradient, typename Code>
GRADCOMP_TARGET uint8_t* ScanBinsImpl(const BinRun& run, uint8_t* bytes) {
  const Gradient* gradient = static_cast<const Gradient*>(run.gradient);
  Code* codes = reinterpret_cast<Code*>(bytes);
  float* bin_max = run.bin_max;
  for (int64_t begin = 0; begin < run.size; begin += run.bin_size) {
    const int64_t size = std::min(run.bin_size, run.size - begin);
    uint32_t maximum;
    Code* end =
        ScanBin(run.residual + begin, gradient + begin, size, run.boost, &maximum, codes);
    if (end == codes) {
      *end++ = kEscape<Code>;
    } else {
      end[-1] |= kLastInBin;
    }
    *bin_max++ = FromBits(maximum);
    codes = end;
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
