#include "source.h"

#include "common.h"

namespace gradcomp {
namespace {

template <typename Gradient>
GRADCOMP_VARIANTS void Add(const float* residual, const Gradient* gradient, int64_t size,
                           float* sums) {
  for (int64_t i = 0; i < size; ++i) sums[i] = residual[i] + ToFloat(gradient[i]);
}

}  // namespace

void Accumulate(const Source& source, int64_t begin, int64_t size, float* sums) {
  WithGradient(source.type, source.gradient, [&](const auto* gradient) {
    Add(source.residual + begin, gradient + begin, size, sums);
  });
}

}  // namespace gradcomp
