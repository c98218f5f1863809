#include "source.h"

#include <algorithm>

#include "simd.h"

namespace gradcomp {
namespace {

constexpr Vectorized Add{[](const float* residual, const auto* gradient, int64_t size,
                            float* sums) GRADCOMP_INLINED {
  for (int64_t i = 0; i < size; ++i) sums[i] = residual[i] + ToFloat(gradient[i]);
}};

}  // namespace

void Accumulate(const Source& source, int64_t begin, int64_t size, float* sums) {
  if (source.gradient == nullptr) {
    std::copy_n(source.residual + begin, size, sums);
    return;
  }
  WithGradient(source.type, source.gradient, [&](const auto* gradient) {
    Add(source.residual + begin, gradient + begin, size, sums);
  });
}

}  // namespace gradcomp
