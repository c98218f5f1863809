#include "precondition.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "blocks.h"
#include "simd.h"

namespace gradcomp {
namespace {

constexpr int64_t kRun = 64;  // elements per unrolled loop

struct OwnSquares {
  GRADCOMP_PART float At(int64_t, float value) const { return value * value; }
  // Returns the larger of a value's magnitude and its square; arbitrary for values below 1.
  GRADCOMP_PART uint32_t LargerMagnitude(int64_t, float value) const {
    return MagnitudeBits(value * value);
  }
  OwnSquares From(int64_t) const { return {}; }
};

struct GivenSquares {
  GRADCOMP_PART float At(int64_t i, float) const { return squares[i]; }
  GRADCOMP_PART uint32_t LargerMagnitude(int64_t i, float value) const {
    return std::max(MagnitudeBits(value), MagnitudeBits(squares[i]));
  }
  GivenSquares From(int64_t begin) const { return {squares + begin}; }
  const float* squares;
};

// Calls use(gradient, squares) with the types of both.
template <typename Use>
void WithSquares(const PreconditionTensor& tensor, const Use& use) {
  WithGradient(tensor.type, tensor.gradient, [&](const auto* gradient) {
    if (tensor.squares) {
      use(gradient, GivenSquares{tensor.squares});
    } else {
      use(gradient, OwnSquares{});
    }
  });
}

// Prefetches far enough ahead to keep memory busy, and near enough to stay in the cache.
template <int for_writing = 0, typename Number>
GRADCOMP_PART void PrefetchRun(const Number* numbers) {
  constexpr int64_t kAhead = 1024;  // elements
  constexpr int64_t kCacheLine = 64 / sizeof(Number);
  for (int64_t i = kAhead; i < kAhead + kRun; i += kCacheLine) {
    __builtin_prefetch(numbers + i, for_writing);
  }
}

constexpr Vectorized LargestWithSquares{[](const auto* gradient, int64_t size,
                                           auto squares) GRADCOMP_INLINED {
  uint32_t largest = 0;
  int64_t i = 0;
  for (; i + kRun <= size; i += kRun) {
    PrefetchRun(gradient + i);
    for (int64_t j = i; j < i + kRun; ++j) {
      largest = std::max(largest, squares.LargerMagnitude(j, ToFloat(gradient[j])));
    }
  }
  for (; i < size; ++i) {
    largest = std::max(largest, squares.LargerMagnitude(i, ToFloat(gradient[i])));
  }
  return FromBits(largest);
}};

// Multiplies the roots, because the product of their squares may overflow.
GRADCOMP_PART float Quotient(float value, float moment, float root_of_scale, float epsilon) {
  return value / (root_of_scale * std::sqrt(moment) + epsilon);
}

template <typename Gradient, typename Squares>
GRADCOMP_PART void DivideRun(const Gradient* gradient, Squares squares, int64_t size, float share,
                             float root_of_scale, float epsilon, float* second_moment,
                             float* preconditioned) {
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < size; ++i) {
    const float value = ToFloat(gradient[i]);
    const float square = squares.At(i, value);
    const float moment = second_moment[i] + share * (square - second_moment[i]);
    second_moment[i] = moment;
    preconditioned[i] = Quotient(value, moment, root_of_scale, epsilon);
  }
}

constexpr Vectorized Divide{[](const auto* gradient, auto squares, int64_t size,
                               const AdamSettings& settings, float* second_moment,
                               float* preconditioned) GRADCOMP_INLINED {
  const float share = 1 - settings.beta_2;
  const float root_of_scale = std::sqrt(settings.scale);
  const float epsilon = settings.epsilon;
  int64_t i = 0;
  for (; i + kRun <= size; i += kRun) {
    PrefetchRun<1>(second_moment + i);
    PrefetchRun(gradient + i);
    DivideRun(gradient + i, squares.From(i), kRun, share, root_of_scale, epsilon,
              second_moment + i, preconditioned + i);
  }
  DivideRun(gradient + i, squares.From(i), size - i, share, root_of_scale, epsilon,
            second_moment + i, preconditioned + i);
}};

constexpr Vectorized TakeBackAll{[](const auto* gradient, auto squares, int64_t size,
                                    const AdamSettings& settings, float* second_moment,
                                    float* preconditioned) GRADCOMP_INLINED {
  // An update and its reversal are rounded by less than this share of the second moment.
  constexpr float kRounding = 0x1p-21f;
  const float share = 1 - settings.beta_2;
  const float decay = std::max(settings.beta_2, 0.5f);
  const float root_of_scale = std::sqrt(settings.scale);
  const float epsilon = settings.epsilon;
  for (int64_t i = 0; i < size; ++i) {
    const float value = ToFloat(gradient[i]);
    const float moment = second_moment[i];
    preconditioned[i] = Quotient(value, moment, root_of_scale, epsilon);
    const float before = moment - share * squares.At(i, value) - kRounding * moment;
    second_moment[i] = std::max(0.0f, before) / decay;
  }
}};

// Calls work(block) for each block of each tensor; a block is itself a PreconditionTensor.
template <typename Work>
void ForEachBlock(const std::vector<PreconditionTensor>& tensors, const ParallelFor& parallel_for,
                  const Work& work) {
  Blocks blocks;
  for (const auto& tensor : tensors) blocks.AddTensor(CeilDiv(tensor.size, kBlockSize));
  blocks.ForEach(parallel_for, kBlockSize, [&](int64_t i, int64_t block) {
    const PreconditionTensor& tensor = tensors[i];
    const int64_t begin = block * kBlockSize;
    work(PreconditionTensor{tensor.second_moment + begin,
                            GradientAt(tensor.type, tensor.gradient, begin), tensor.type,
                            std::min(tensor.size - begin, kBlockSize),
                            tensor.preconditioned + begin,
                            tensor.squares ? tensor.squares + begin : nullptr, tensor.adam});
  });
}

}  // namespace

void Precondition(const std::vector<PreconditionTensor>& tensors,
                  const ParallelFor& parallel_for) {
  std::atomic<bool> finite{true};
  ForEachBlock(tensors, parallel_for, [&](const PreconditionTensor& block) {
    if (!std::isfinite(LargestMagnitude(block))) finite = false;
  });
  if (!finite) {
    for (const PreconditionTensor& tensor : tensors) {
      std::fill_n(tensor.preconditioned, tensor.size, std::numeric_limits<float>::quiet_NaN());
    }
    return;
  }
  ForEachBlock(tensors, parallel_for, PreconditionFinite);
}

float LargestMagnitude(const PreconditionTensor& tensor) {
  float largest = 0;
  WithSquares(tensor, [&](const auto* gradient, const auto& squares) {
    largest = LargestWithSquares(gradient, tensor.size, squares);
  });
  return largest;
}

void PreconditionFinite(const PreconditionTensor& tensor) {
  WithSquares(tensor, [&](const auto* gradient, const auto& squares) {
    Divide(gradient, squares, tensor.size, tensor.adam, tensor.second_moment,
           tensor.preconditioned);
  });
}

void TakeBack(const PreconditionTensor& tensor) {
  WithSquares(tensor, [&](const auto* gradient, const auto& squares) {
    TakeBackAll(gradient, squares, tensor.size, tensor.adam, tensor.second_moment,
                tensor.preconditioned);
  });
}

}  // namespace gradcomp
