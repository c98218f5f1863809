#include "momentum.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "blocks.h"

namespace gradcomp {
namespace {

constexpr int64_t kSquareLanes = 8;  // independent partial sums, which overlap in time

// Calls work(tensor, begin, end).
template <typename Work>
void ForEachBlock(const std::vector<MomentumTensor>& tensors, const ParallelFor& parallel_for,
                  const Work& work) {
  Blocks blocks;
  for (const MomentumTensor& tensor : tensors) blocks.AddTensor(CeilDiv(tensor.size, kBlockSize));
  blocks.ForEach(parallel_for, kBlockSize, [&](int64_t i, int64_t block) {
    work(i, block * kBlockSize, std::min(tensors[i].size, (block + 1) * kBlockSize));
  });
}

template <typename Gradient>
double SumOfSquares(const Gradient* gradient, int64_t begin, int64_t end) {
  double lanes[kSquareLanes] = {};
  const auto add = [&](int64_t lane, int64_t i) {
    const double value = ToFloat(gradient[i]);
    lanes[lane] += value * value;
  };
  for (; begin + kSquareLanes <= end; begin += kSquareLanes) {
    for (int64_t lane = 0; lane < kSquareLanes; ++lane) add(lane, begin + lane);
  }
  for (int64_t lane = 0; begin < end; ++lane, ++begin) add(lane, begin);
  return std::accumulate(std::begin(lanes), std::end(lanes), 0.0);
}

}  // namespace

float ClipScale(const std::vector<MomentumTensor>& tensors, float clip_norm,
                const ParallelFor& parallel_for) {
  if (std::isinf(clip_norm)) return 1;
  std::vector<std::vector<double>> squares;  // by tensor and block
  for (const MomentumTensor& tensor : tensors) {
    squares.emplace_back(CeilDiv(tensor.size, kBlockSize));
  }
  ForEachBlock(tensors, parallel_for, [&](int64_t i, int64_t begin, int64_t end) {
    WithGradient(tensors[i].type, tensors[i].gradient, [&](auto* gradient) {
      squares[i][begin / kBlockSize] = SumOfSquares(gradient, begin, end);
    });
  });
  double sum = 0;
  for (const std::vector<double>& of_tensor : squares) {
    sum = std::accumulate(of_tensor.begin(), of_tensor.end(), sum);
  }
  const double norm = std::sqrt(sum);
  return norm > clip_norm ? static_cast<float>(clip_norm / norm) : 1;
}

void CorrectMomentum(const std::vector<MomentumTensor>& tensors, float scale, float momentum,
                     const ParallelFor& parallel_for) {
  ForEachBlock(tensors, parallel_for, [&](int64_t i, int64_t begin, int64_t end) {
    const float* velocity = tensors[i].velocity;
    float* corrected = tensors[i].corrected;
    WithGradient(tensors[i].type, tensors[i].gradient, [=](auto* gradient) {
      if (velocity == nullptr) {
        for (int64_t j = begin; j < end; ++j) corrected[j] = scale * ToFloat(gradient[j]);
      } else {
        for (int64_t j = begin; j < end; ++j) {
          corrected[j] = scale * ToFloat(gradient[j]) + momentum * velocity[j];
        }
      }
    });
  });
}

}  // namespace gradcomp
