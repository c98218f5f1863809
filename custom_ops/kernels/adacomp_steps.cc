#include "adacomp_steps.h"

#include <algorithm>
#include <cstring>

#include "adacomp_layout.h"
#include "one_lane.h"

namespace gradcomp {
namespace {

constexpr int64_t kCyclesPerElement = 2;

template <typename Gradient>
void Accumulate(const float* residual, const void* gradient, int64_t begin, int64_t end,
                float boost, float* accumulated, float* boosted) {
  const Gradient* from = static_cast<const Gradient*>(gradient);
  for (int64_t i = begin; i < end; ++i) {
    const float g = ToFloat(from[i]);
    accumulated[i] = residual[i] + g;
    boosted[i] = accumulated[i] + boost * g;
  }
}

void SelectInBin(const float* accumulated, const float* boosted, int64_t begin, int64_t end,
                 float* bin_max, std::vector<int64_t>* positions) {
  uint32_t maximum = 0;
  for (int64_t i = begin; i < end; ++i) maximum = std::max(maximum, MagnitudeBits(accumulated[i]));
  *bin_max = FromBits(maximum);
  if (!IsFiniteMagnitude(maximum)) return;
  for (int64_t i = begin; i < end; ++i) {
    if (IsSent(accumulated[i], boosted[i], maximum)) positions->push_back(i);
  }
}

}  // namespace

void AccumulateResidual(const float* residual, const void* gradient, GradientType type,
                        int64_t size, float scale_factor, const ParallelFor& parallel_for,
                        float* accumulated, float* boosted) {
  const auto accumulate = type == GradientType::kFloat  ? Accumulate<float>
                          : type == GradientType::kHalf ? Accumulate<Half>
                                                        : Accumulate<BFloat16>;
  parallel_for(size, kCyclesPerElement, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    accumulate(residual, gradient, begin, end, scale_factor - 1, accumulated, boosted);
  });
}

std::vector<int64_t> SelectInBins(const float* accumulated, const float* boosted, int64_t size,
                                  int64_t bin_size, const ParallelFor& parallel_for,
                                  float* bin_max) {
  const Binning bins(size, bin_size);
  std::vector<std::vector<int64_t>> by_block(bins.num_blocks);
  parallel_for(bins.num_blocks, kBlockSize, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t first_bin = block * bins.bins_per_block;
      for (int64_t bin = first_bin; bin < first_bin + bins.BlockBins(block); ++bin) {
        const int64_t begin = bin * bin_size;
        SelectInBin(accumulated, boosted, begin, std::min(begin + bin_size, size), bin_max + bin,
                    &by_block[block]);
      }
    }
  });
  std::vector<int64_t> positions;
  for (const auto& part : by_block) positions.insert(positions.end(), part.begin(), part.end());
  return positions;
}

float ScaleOf(const float* bin_max, int64_t num_bins) {
  const IeeeArithmetic ieee;
  double sum = 0;
  for (int64_t i = 0; i < num_bins; ++i) sum += bin_max[i];
  return num_bins > 0 ? static_cast<float>(sum / static_cast<double>(num_bins)) : 0;
}

Status CheckPositions(const int64_t* positions, int64_t num_positions, int64_t size) {
  for (int64_t i = 0, previous = -1; i < num_positions; previous = positions[i++]) {
    if (positions[i] <= previous || positions[i] >= size) {
      return {Concat("positions[", i, "] is ", positions[i], "; expected one above ", previous,
                     " and below ", size, ", the number of elements")};
    }
  }
  return {};
}

void QuantizeTernary(const float* accumulated, int64_t size, const int64_t* positions,
                     int64_t num_positions, float scale, const ParallelFor& parallel_for,
                     int8_t* signs, float* residual) {
  parallel_for(size, 1, [&](int64_t begin, int64_t end) {
    std::memcpy(residual + begin, accumulated + begin, (end - begin) * sizeof(float));
  });
  parallel_for(num_positions, 8 * kCyclesPerElement, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t i = begin; i < end; ++i) {
      const float value = accumulated[positions[i]];
      signs[i] = (value > 0) - (value < 0);
      residual[positions[i]] = value - static_cast<float>(signs[i]) * scale;
    }
  });
}

}  // namespace gradcomp
