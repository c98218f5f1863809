#include "power_sgd_tiles.h"

#include <cstring>

#include "simd.h"

namespace gradcomp {
namespace {

typedef float Vector __attribute__((vector_size(4 * kTileLanes)));

// Vectors are not passed by value, because the calling convention differs between the variants.
GRADCOMP_PART void Load(const float* values, Vector* vector) {
  std::memcpy(vector, values, sizeof *vector);
}
GRADCOMP_PART void Store(const Vector& vector, float* values) {
  std::memcpy(values, &vector, sizeof vector);
}

GRADCOMP_PART float Sum(const Vector& lanes) {
  const float a = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6]);
  const float b = (lanes[1] + lanes[5]) + (lanes[3] + lanes[7]);
  return a + b;
}

template <typename Float>
GRADCOMP_PART Columns<Float> From(Columns<Float> columns, int64_t first) {
  return {columns.values + first * columns.stride, columns.stride};
}

template <typename Gradient>
GRADCOMP_PART bool AddRowsOf(const float* residual, const void* gradient, int64_t rows,
                               int64_t columns, int64_t stride, float* sum, int64_t sum_stride) {
  uint32_t not_finite = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float* add = residual + i * stride;
    const Gradient* to = static_cast<const Gradient*>(gradient) + i * stride;
    for (int64_t j = 0; j < columns; ++j) {
      const float value = add[j] + ToFloat(to[j]);
      not_finite |= (ToBits(value) & kInfinityBits) == kInfinityBits;
      sum[i * sum_stride + j] = value;
    }
  }
  return not_finite == 0;
}

// The following functions process kRank columns at a time, whose sums stay in registers.

template <int kRank>
GRADCOMP_PART void TimesRight(const Tile& tile, Columns<const float> right, Columns<float> left) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    const float* row = tile.values + i * tile.width;
    Vector sums[kRank] = {};
    for (int64_t j = 0; j < tile.width; j += kTileLanes) {
      Vector elements;
      Load(row + j, &elements);
      for (int k = 0; k < kRank; ++k) {
        Vector factors;
        Load(From(right, k).values + j, &factors);
        sums[k] += elements * factors;
      }
    }
    for (int k = 0; k < kRank; ++k) From(left, k).values[i] += Sum(sums[k]);
  }
}

template <int kRank>
GRADCOMP_PART void TimesLeft(const Tile& tile, Columns<const float> left, Columns<float> right) {
  for (int64_t j = 0; j < tile.width; j += kTileLanes) {
    Vector sums[kRank];
    for (int k = 0; k < kRank; ++k) Load(From(right, k).values + j, &sums[k]);
    for (int64_t i = 0; i < tile.rows; ++i) {
      Vector elements;
      Load(tile.values + i * tile.width + j, &elements);
      for (int k = 0; k < kRank; ++k) sums[k] += elements * From(left, k).values[i];
    }
    for (int k = 0; k < kRank; ++k) Store(sums[k], From(right, k).values + j);
  }
}

template <int kRank>
GRADCOMP_PART void Product(Columns<const float> left, Columns<const float> right, float sign,
                             Tile* tile) {
  for (int64_t i = 0; i < tile->rows; ++i) {
    float* row = tile->values + i * tile->width;
    float scaled[kRank];
    for (int k = 0; k < kRank; ++k) scaled[k] = sign * From(left, k).values[i];
    for (int64_t j = 0; j < tile->width; j += kTileLanes) {
      Vector sum;
      Load(row + j, &sum);
      for (int k = 0; k < kRank; ++k) {
        Vector factors;
        Load(From(right, k).values + j, &factors);
        sum += scaled[k] * factors;
      }
      Store(sum, row + j);
    }
  }
}

constexpr Vectorized kAddRows{[](const float* residual, const void* gradient, GradientType type,
                                 int64_t rows, int64_t columns, int64_t stride, float* sum,
                                 int64_t sum_stride) GRADCOMP_INLINED {
  switch (type) {
    case GradientType::kFloat:
      return AddRowsOf<float>(residual, gradient, rows, columns, stride, sum, sum_stride);
    case GradientType::kHalf:
      return AddRowsOf<Half>(residual, gradient, rows, columns, stride, sum, sum_stride);
    case GradientType::kBFloat16:
      return AddRowsOf<BFloat16>(residual, gradient, rows, columns, stride, sum, sum_stride);
  }
  return false;
}};

constexpr Vectorized kAddTimesRight{[](const Tile& tile, Columns<const float> right, int64_t rank,
                                       Columns<float> left) GRADCOMP_INLINED {
  int64_t k = 0;
  for (; k + 4 <= rank; k += 4) TimesRight<4>(tile, From(right, k), From(left, k));
  for (; k + 2 <= rank; k += 2) TimesRight<2>(tile, From(right, k), From(left, k));
  for (; k < rank; ++k) TimesRight<1>(tile, From(right, k), From(left, k));
}};

constexpr Vectorized kAddTimesLeft{[](const Tile& tile, Columns<const float> left, int64_t rank,
                                      Columns<float> right) GRADCOMP_INLINED {
  int64_t k = 0;
  for (; k + 4 <= rank; k += 4) TimesLeft<4>(tile, From(left, k), From(right, k));
  for (; k + 2 <= rank; k += 2) TimesLeft<2>(tile, From(left, k), From(right, k));
  for (; k < rank; ++k) TimesLeft<1>(tile, From(left, k), From(right, k));
}};

constexpr Vectorized kAddProduct{[](Columns<const float> left, Columns<const float> right,
                                    int64_t rank, float sign, Tile* tile) GRADCOMP_INLINED {
  int64_t k = 0;
  for (; k + 4 <= rank; k += 4) Product<4>(From(left, k), From(right, k), sign, tile);
  for (; k + 2 <= rank; k += 2) Product<2>(From(left, k), From(right, k), sign, tile);
  for (; k < rank; ++k) Product<1>(From(left, k), From(right, k), sign, tile);
}};

}  // namespace

bool AddRows(const float* residual, const void* gradient, GradientType type, int64_t rows,
             int64_t columns, int64_t stride, float* sum, int64_t sum_stride) {
  return kAddRows(residual, gradient, type, rows, columns, stride, sum, sum_stride);
}

void AddTimesRight(const Tile& tile, Columns<const float> right, int64_t rank,
                   Columns<float> left) {
  kAddTimesRight(tile, right, rank, left);
}

void AddTimesLeft(const Tile& tile, Columns<const float> left, int64_t rank,
                  Columns<float> right) {
  kAddTimesLeft(tile, left, rank, right);
}

void AddProduct(Columns<const float> left, Columns<const float> right, int64_t rank, float sign,
                Tile* tile) {
  kAddProduct(left, right, rank, sign, tile);
}

}  // namespace gradcomp
