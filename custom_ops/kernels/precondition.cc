#include "precondition.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "blocks.h"

namespace gradcomp {
namespace {

constexpr int64_t kBlockSize = 1 << 16;  // elements

// Calls work(tensor, its gradient, begin, end), where gradient is a pointer of the type that it has.
template <typename Work>
void ForEachBlock(const std::vector<PreconditionTensor>& tensors, const ParallelFor& parallel_for,
                  const Work& work) {
  Blocks blocks;
  for (const auto& tensor : tensors) blocks.AddTensor(CeilDiv(tensor.size, kBlockSize));
  blocks.ForEach(parallel_for, kBlockSize, [&](int64_t i, int64_t block) {
    const int64_t begin = block * kBlockSize;
    const int64_t end = std::min(tensors[i].size, begin + kBlockSize);
    WithGradient(tensors[i].type, tensors[i].gradient,
                 [&](const auto* gradient) { work(tensors[i], gradient, begin, end); });
  });
}

template <typename Gradient>
GRADCOMP_VARIANTS bool SquaresAreFinite(const Gradient* gradient, int64_t begin, int64_t end) {
  uint32_t largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const float value = ToFloat(gradient[i]);
    largest = std::max(largest, MagnitudeBits(value * value));
  }
  return IsFiniteMagnitude(largest);
}

template <typename Gradient>
GRADCOMP_VARIANTS void Divide(const Gradient* gradient, int64_t begin, int64_t end,
                              const AdamSettings& settings, float* second_moment,
                              float* preconditioned) {
  const float share = 1 - settings.beta_2;
  const float scale = settings.scale;
  const float epsilon = settings.epsilon;
  for (int64_t i = begin; i < end; ++i) {
    const float value = ToFloat(gradient[i]);
    const float moment = second_moment[i] + share * (value * value - second_moment[i]);
    second_moment[i] = moment;
    preconditioned[i] = value / (std::sqrt(scale * moment) + epsilon);
  }
}

}  // namespace

void Precondition(const std::vector<PreconditionTensor>& tensors, const AdamSettings& settings,
                  const ParallelFor& parallel_for) {
  std::atomic<bool> finite{true};
  ForEachBlock(tensors, parallel_for,
               [&](const PreconditionTensor&, const auto* gradient, int64_t begin, int64_t end) {
                 if (!SquaresAreFinite(gradient, begin, end)) finite = false;
               });
  if (!finite) {
    for (const PreconditionTensor& tensor : tensors) {
      std::fill_n(tensor.preconditioned, tensor.size, std::numeric_limits<float>::quiet_NaN());
    }
    return;
  }
  ForEachBlock(
      tensors, parallel_for,
      [&](const PreconditionTensor& tensor, const auto* gradient, int64_t begin, int64_t end) {
        Divide(gradient, begin, end, settings, tensor.second_moment, tensor.preconditioned);
      });
}

}  // namespace gradcomp
