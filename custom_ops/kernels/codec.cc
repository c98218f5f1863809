#include "codec.h"

namespace gradcomp {
namespace {

template <typename Gradient>
GRADCOMP_VARIANTS void Add(const float* residual, const void* gradient, int64_t begin,
                           int64_t size, float* sums) {
  const Gradient* from = static_cast<const Gradient*>(gradient) + begin;
  for (int64_t i = 0; i < size; ++i) sums[i] = residual[begin + i] + ToFloat(from[i]);
}

}  // namespace

void Accumulate(const Source& source, int64_t begin, int64_t size, float* sums) {
  switch (source.type) {
    case GradientType::kFloat:
      return Add<float>(source.residual, source.gradient, begin, size, sums);
    case GradientType::kHalf:
      return Add<Half>(source.residual, source.gradient, begin, size, sums);
    case GradientType::kBFloat16:
      return Add<BFloat16>(source.residual, source.gradient, begin, size, sums);
  }
}

}  // namespace gradcomp
