// AdaComp's passes, written once and compiled for each instruction set. The includer defines
// GRADCOMP_TARGET, and above the include, in its namespace, the class `Vector`, which has the members
// of OneLane. No include guard, because the target is a property of the functions.
//
// The last vector of a bin ends with the bin and overlaps the vector before. No vector is therefore
// partial, because a masked store at the end of a bin would delay the loads of the next bin.

// Prefetches beyond the next strip, so that memory is busy while a strip is computed.
template <typename Number>
GRADCOMP_TARGET inline void Prefetch(const Number* numbers) {
  constexpr int64_t kAhead = 1536;  // elements
  __builtin_prefetch(numbers + kAhead, 0);
}

template <typename V, typename Gradient>
GRADCOMP_TARGET inline uint32_t MaximumOf(const float* residual, const Gradient* gradient,
                                          int64_t size) {
  if (size < V::kWidth) return MaximumOf<OneLane>(residual, gradient, size);
  const int64_t last = size - V::kWidth;
  auto maxima = V::Magnitude(V::Load(residual + last) + V::Load(gradient + last));
  for (int64_t i = 0; i < last; i += V::kWidth) {
    maxima = V::Max(maxima, V::Magnitude(V::Load(residual + i) + V::Load(gradient + i)));
  }
  return V::LargestLane(maxima);
}

template <typename V, typename Code>
struct BinSender {
  typename V::Floats boost;
  typename V::Floats scale;
  typename V::Words bin_max;
  Code* codes;

  // `own` has the lanes whose codes are not yet appended by the vector before.
  GRADCOMP_TARGET __attribute__((always_inline)) void Send(typename V::Floats residual,
                                                           typename V::Floats gradient,
                                                           int64_t first, uint32_t own,
                                                           float* to) {
    const auto accumulated = residual + gradient;
    const auto boosted = accumulated + boost * gradient;
    const auto sent = V::Sent(accumulated, boosted, bin_max);
    V::Store(V::Subtract(accumulated, scale, sent), to);
    codes = V::Append(accumulated, V::Bits(sent) & own, first, codes);
  }
};

template <typename V, typename Gradient, typename Code>
GRADCOMP_TARGET inline Code* SendBin(const float* residual, const Gradient* gradient, int64_t size,
                                     uint32_t bin_max, const SendSettings& settings, float* to,
                                     Code* codes) {
  if (size < V::kWidth) {
    return SendBin<OneLane>(residual, gradient, size, bin_max, settings, to, codes);
  }
  constexpr uint32_t kAllLanes = (1u << V::kWidth) - 1;
  BinSender<V, Code> sender = {V::Broadcast(settings.boost), V::Broadcast(settings.scale),
                               V::Broadcast(bin_max), codes};
  const int64_t last = size - V::kWidth;
  // Before the loop overwrites a part of it.
  const auto last_residual = V::Load(residual + last);
  const auto last_gradient = V::Load(gradient + last);
  int64_t i = 0;
  for (; i < last; i += V::kWidth) {
    Prefetch(residual + i);
    Prefetch(gradient + i);
    sender.Send(V::Load(residual + i), V::Load(gradient + i), i, kAllLanes, to + i);
  }
  sender.Send(last_residual, last_gradient, last, kAllLanes & kAllLanes << (i - last), to + last);
  return sender.codes;
}

// A bin of zeros that stays zero, as in unused rows of an embedding, is not written.
inline bool StaysZero(const float* to, int64_t size, uint32_t bin_max) {
  if (bin_max != 0) return false;
  uint32_t bits = 0;
  for (int64_t i = 0; i < size; ++i) bits |= ToBits(to[i]);
  return bits == 0;
}

template <typename Gradient>
GRADCOMP_TARGET void FindMaxima(const BinRun& run) {
  const Gradient* gradient = static_cast<const Gradient*>(run.gradient);
  float* bin_max = run.bin_max;
  for (int64_t begin = 0; begin < run.size; begin += run.bin_size) {
    const int64_t size = std::min(run.bin_size, run.size - begin);
    *bin_max++ = FromBits(MaximumOf<Vector>(run.residual + begin, gradient + begin, size));
  }
}

template <typename Gradient, typename Code>
GRADCOMP_TARGET uint8_t* SendBins(const BinRun& run, const SendSettings& settings,
                                  uint8_t* bytes) {
  const Gradient* gradient = static_cast<const Gradient*>(run.gradient);
  Code* codes = reinterpret_cast<Code*>(bytes);
  const float* bin_max = run.bin_max;
  for (int64_t begin = 0; begin < run.size; begin += run.bin_size) {
    const int64_t size = std::min(run.bin_size, run.size - begin);
    const uint32_t maximum = ToBits(*bin_max++);
    float* to = run.to + begin;
    Code* end = codes;
    if (!StaysZero(to, size, maximum)) {
      end = SendBin<Vector>(run.residual + begin, gradient + begin, size, maximum, settings, to,
                            codes);
    }
    if (end == codes) {
      *end++ = kEscape<Code>;
    } else {
      end[-1] |= kLastInBin;
    }
    codes = end;
  }
  return reinterpret_cast<uint8_t*>(codes);
}

template <typename Gradient>
BinKernels KernelsOf(int64_t bin_size) {
  return {&FindMaxima<Gradient>, CodeBytes(bin_size) == 1 ? &SendBins<Gradient, Code8>
                                                          : &SendBins<Gradient, Code16>};
}

inline BinKernels KernelsOf(GradientType type, int64_t bin_size) {
  switch (type) {
    case GradientType::kFloat:
      return KernelsOf<float>(bin_size);
    case GradientType::kHalf:
      return KernelsOf<Half>(bin_size);
    case GradientType::kBFloat16:
      return KernelsOf<BFloat16>(bin_size);
  }
  return {};
}
