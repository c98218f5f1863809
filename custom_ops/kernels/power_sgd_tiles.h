// PowerSGD's inner loops. A tile is a piece of a matrix, residual plus gradient as float32, that
// stays in the processor's cache.
#pragma once

#include <cstdint>

#include "floats.h"

namespace gradcomp {

// Rows are padded with zeros to a multiple of this number. No vector is then partial, and sums have
// the same order for any width of the processor's vectors.
inline constexpr int64_t kTileLanes = 8;

struct Tile {
  static constexpr int64_t kSize = 1 << 13;  // elements

  alignas(64) float values[kSize] = {};
  int64_t rows = 0;
  int64_t width = 0;  // elements of a row with its padding
};

// Columns of P or Q: element i of column k is at values[k * stride + i].
template <typename Float>
struct Columns {
  Float* values;
  int64_t stride;
};

// Computes sum = residual + gradient. Rows begin `stride` elements apart, and sum_stride apart in
// `sum`, which may be the residual. Returns whether all sums are finite.
bool AddRows(const float* residual, const void* gradient, GradientType type, int64_t rows,
             int64_t columns, int64_t stride, float* sum, int64_t sum_stride);

// Computes left += tile right.
void AddTimesRight(const Tile& tile, Columns<const float> right, int64_t rank, Columns<float> left);

// Computes right += tile^T left.
void AddTimesLeft(const Tile& tile, Columns<const float> left, int64_t rank, Columns<float> right);

// Computes tile += sign left right^T.
void AddProduct(Columns<const float> left, Columns<const float> right, int64_t rank, float sign,
                Tile* tile);

}  // namespace gradcomp
