#include "power_sgd.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "power_sgd_tiles.h"

namespace gradcomp {
namespace {

// Both dimensions of a block are much larger than the rank, so that a block's work is large
// compared with its parts of P and Q. They are small enough to keep sums over them precise.
constexpr int64_t kMatrixBlockSize = 1 << 17;  // elements, at most
constexpr int64_t kBlockColumns = 1 << 9;      // at most
constexpr int64_t kBlockRows = 1 << 12;        // at most
constexpr int64_t kCyclesPerBlock = 2 * kMatrixBlockSize;

// A column of P counts as zero if subtracting the columns before it leaves less than this share of
// its length, because the rest is then rounding errors.
constexpr double kVanished = 1e-4;

int64_t Padded(int64_t columns) { return CeilDiv(columns, kTileLanes) * kTileLanes; }

const void* GradientAt(const PowerSgdTensor& tensor, int64_t element) {
  return GradientAt(tensor.type, tensor.gradient, element);
}

template <typename A, typename B>
double Dot(const A* a, const B* b, int64_t size) {
  constexpr int kSums = 8;  // independent sums, which overlap in time
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= size; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += static_cast<double>(a[i + j]) * b[i + j];
  }
  for (int j = 0; i < size; ++i, ++j) sums[j] += static_cast<double>(a[i]) * b[i];
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

template <typename A>
double Length(const A* values, int64_t size) {
  return std::sqrt(Dot(values, values, size));
}

// Adds a block's part to P or Q; the first part initializes it.
void AddPart(Columns<const float> part, int64_t rank, int64_t size, bool first,
             Columns<float> whole) {
  for (int64_t k = 0; k < rank; ++k) {
    const float* from = part.values + k * part.stride;
    float* to = whole.values + k * whole.stride;
    for (int64_t i = 0; i < size; ++i) to[i] = first ? from[i] : to[i] + from[i];
  }
}

}  // namespace

// Runs Gram-Schmidt twice, because one run is inaccurate if it leaves little of a column.
void OrthonormalizeColumns(int64_t rows, int64_t rank, float* columns) {
  std::vector<double> column(rows);
  for (int64_t k = 0; k < rank; ++k) {
    float* values = columns + k * rows;
    std::copy(values, values + rows, column.begin());
    const double before = Length(column.data(), rows);
    for (int64_t i = 0; i < 2 * k; ++i) {
      const float* other = columns + i % k * rows;
      const double along = Dot(other, column.data(), rows);
      for (int64_t j = 0; j < rows; ++j) column[j] -= along * other[j];
    }
    const double left = Length(column.data(), rows);
    const double scale = left > kVanished * before ? 1 / left : 0;
    for (int64_t j = 0; j < rows; ++j) values[j] = static_cast<float>(column[j] * scale);
  }
}

bool CanMultiplyColumns(int64_t rows, int64_t rank, const float* columns) {
  for (int64_t j = 0; j < rows; ++j) {
    float sum = 0;
    for (int64_t k = 0; k < rank; ++k) sum += 2 * std::fabs(columns[k * rows + j]);
    if (!std::isfinite(sum)) return false;
  }
  return true;
}

void TakeColumns(const float* factor, int64_t rows, int64_t stride, int64_t rank,
                 std::mt19937* random, float* columns) {
  for (int64_t k = 0; k < rank; ++k) {
    float* column = columns + k * rows;
    for (int64_t j = 0; j < rows; ++j) column[j] = factor[j * stride + k];
    if (std::any_of(column, column + rows, [](float value) { return value != 0; })) continue;
    for (int64_t j = 0; j < rows; ++j) {
      column[j] = static_cast<float>(static_cast<int32_t>((*random)())) * 0x1p-31f;
    }
  }
}

void StoreColumns(const float* columns, int64_t rows, int64_t stride, int64_t rank, float* factor) {
  for (int64_t k = 0; k < rank; ++k) {
    const float* column = columns + k * rows;
    const double length = Length(column, rows);
    const double scale = length > 0 ? 1 / length : 0;
    for (int64_t j = 0; j < rows; ++j) {
      factor[j * stride + k] = static_cast<float>(column[j] * scale);
    }
  }
  for (int64_t j = 0; j < rows && rank < stride; ++j) {
    std::fill(factor + j * stride + rank, factor + (j + 1) * stride, 0.0f);
  }
}

Status CheckRanks(const std::vector<int64_t>& ranks, int64_t num_tensors) {
  if (static_cast<int64_t>(ranks.size()) == num_tensors) return {};
  return {Concat("ranks has ", ranks.size(), " entries; expected ", num_tensors,
                 ": give one rank for each tensor")};
}

Status CheckRank(int64_t tensor, int64_t rank, int64_t rows, int64_t columns) {
  const int64_t largest = std::min(rows, columns);
  if (rank >= 0 && rank <= largest) return {};
  return {Concat("ranks[", tensor, "] is ", rank, "; expected 1 to ", largest,
                 ", the smaller dimension of tensor ", tensor, ", or 0 to send it whole")};
}

int64_t PowerSgdTensor::block_columns() const {
  return std::min(kBlockColumns, columns);
}

int64_t PowerSgdTensor::block_rows() const {
  return std::min(kBlockRows, kMatrixBlockSize / block_columns());
}

PowerSgd::PowerSgd(const std::vector<PowerSgdTensor>& tensors, ParallelFor parallel_for)
    : tensors_(tensors), parallel_for_(std::move(parallel_for)) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const PowerSgdTensor& tensor = tensors_[i];
    left_begin_.push_back(left_size_);
    right_begin_.push_back(right_size_);
    left_size_ += tensor.left_size();
    right_size_ += tensor.right_size();
    AddBlocks(i);
  }
}

void PowerSgd::AddBlocks(int64_t index) {
  const PowerSgdTensor& tensor = tensors_[index];
  if (tensor.rank == 0) {
    for (int64_t i = 0; i < tensor.size(); i += kMatrixBlockSize) {
      blocks_.push_back({index, 0, i, 1, std::min(kMatrixBlockSize, tensor.size() - i)});
    }
    return;
  }
  const int64_t columns = tensor.block_columns();
  const int64_t rows = tensor.block_rows();
  for (int64_t i = 0; i < tensor.rows; i += rows) {
    for (int64_t j = 0; j < tensor.columns; j += columns) {
      blocks_.push_back({index, i, j, std::min(rows, tensor.rows - i),
                         std::min(columns, tensor.columns - j)});
    }
  }
}

template <typename Work>
void PowerSgd::ForEachBlock(const Work& work) const {
  parallel_for_(blocks_.size(), kCyclesPerBlock, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t i = begin; i < end; ++i) work(i, blocks_[i], tensors_[blocks_[i].tensor]);
  });
}

// Calls work(tile, its first row in the block). Returns whether all elements are finite.
template <typename Work>
bool PowerSgd::ForEachTile(const Block& block, const Work& work) const {
  const PowerSgdTensor& tensor = tensors_[block.tensor];
  Tile tile;
  tile.width = Padded(block.columns);
  const int64_t rows = Tile::kSize / tile.width;
  bool finite = true;
  for (int64_t row = 0; row < block.rows; row += rows) {
    const int64_t at = (block.row + row) * tensor.columns + block.column;
    tile.rows = std::min(rows, block.rows - row);
    finite &= AddRows(tensor.residual + at, GradientAt(tensor, at), tensor.type, tile.rows,
                      block.columns, tensor.columns, tile.values, tile.width);
    work(&tile, row);
  }
  return finite;
}

bool PowerSgd::ComputeLeft(const std::vector<float>& start, float* left) const {
  Parts parts(blocks_.size());
  std::atomic<bool> finite{true};
  ForEachBlock([&](int64_t i, const Block& block, const PowerSgdTensor& tensor) {
    bool block_finite;
    if (tensor.rank == 0) {
      const int64_t at = block.column;
      block_finite = AddRows(tensor.residual + at, GradientAt(tensor, at), tensor.type, 1,
                             block.columns, 0, left + left_begin_[block.tensor] + at, 0);
    } else {
      const std::vector<float> right = PaddedRight(block, start.data());
      parts[i].resize(tensor.rank * block.rows);
      block_finite = ForEachTile(block, [&](Tile* tile, int64_t row) {
        AddTimesRight(*tile, {right.data(), tile->width}, tensor.rank,
                      {parts[i].data() + row, block.rows});
      });
    }
    if (!block_finite) finite = false;
  });
  const IeeeArithmetic ieee;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    const PowerSgdTensor& tensor = tensors_[block.tensor];
    AddPart({parts[i].data(), block.rows}, tensor.rank, block.rows, block.column == 0,
            {left + left_begin_[block.tensor] + block.row, tensor.rows});
  }
  left[0] = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  return finite;
}

std::vector<float> PowerSgd::Start(const std::vector<const float*>& factors, int64_t step) const {
  const IeeeArithmetic ieee;
  std::vector<float> start(right_size_);
  std::mt19937 random(static_cast<uint32_t>(step));  // portable
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const PowerSgdTensor& tensor = tensors_[i];
    TakeColumns(factors[i], tensor.columns, tensor.factor_columns, tensor.rank, &random,
                start.data() + right_begin_[i]);
  }
  return start;
}

// Returns the rows of Q for the block's columns, padded like its tiles.
std::vector<float> PowerSgd::PaddedRight(const Block& block, const float* right) const {
  const PowerSgdTensor& tensor = tensors_[block.tensor];
  const int64_t width = Padded(block.columns);
  std::vector<float> padded(tensor.rank * width);
  for (int64_t k = 0; k < tensor.rank; ++k) {
    const float* from = right + right_begin_[block.tensor] + k * tensor.columns + block.column;
    std::copy_n(from, block.columns, padded.data() + k * width);
  }
  return padded;
}

bool PowerSgd::Orthonormalize(float* left) const {
  if (!AllFinite(left, left_size_)) return false;
  parallel_for_(tensors_.size(), kCyclesPerBlock / 32, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t i = begin; i < end; ++i) {
      OrthonormalizeColumns(tensors_[i].rows, tensors_[i].rank, left + left_begin_[i]);
    }
  });
  return true;
}

bool PowerSgd::ComputeRight(const float* left, float* right) const {
  Parts parts(blocks_.size());
  std::atomic<bool> finite{true};
  ForEachBlock([&](int64_t i, const Block& block, const PowerSgdTensor& tensor) {
    if (tensor.rank == 0) return;
    const float* from = left + left_begin_[block.tensor] + block.row;
    parts[i].resize(tensor.rank * Padded(block.columns));
    const bool block_finite = ForEachTile(block, [&](Tile* tile, int64_t row) {
      AddTimesLeft(*tile, {from + row, tensor.rows}, tensor.rank, {parts[i].data(), tile->width});
    });
    if (!block_finite) finite = false;
  });
  const IeeeArithmetic ieee;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    const PowerSgdTensor& tensor = tensors_[block.tensor];
    AddPart({parts[i].data(), Padded(block.columns)}, tensor.rank, block.columns, block.row == 0,
            {right + right_begin_[block.tensor] + block.column, tensor.columns});
  }
  return finite;
}

bool PowerSgd::CanMultiply(const float* right) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!CanMultiply(i, right)) return false;
  }
  return true;
}

bool PowerSgd::CanMultiply(int64_t index, const float* right) const {
  const PowerSgdTensor& tensor = tensors_[index];
  return CanMultiplyColumns(tensor.columns, tensor.rank, right + right_begin_[index]);
}

void PowerSgd::FlagProducts(float* right) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!CanMultiply(i, right)) right[right_begin_[i]] = std::numeric_limits<float>::quiet_NaN();
  }
}

void PowerSgd::Reduce(const Factors& local, const Factors& total,
                      const std::vector<float*>& reduced) const {
  ForEachBlock([&](int64_t, const Block& block, const PowerSgdTensor& tensor) {
    float* to = reduced[block.tensor];
    if (tensor.rank > 0) return ReduceBlock(block, local, total, to);
    const float* from = total.left + left_begin_[block.tensor];
    std::copy_n(from + block.column, block.columns, to + block.column);
    std::fill_n(tensor.residual + block.column, block.columns, 0.0f);
  });
}

void PowerSgd::ReduceBlock(const Block& block, const Factors& local, const Factors& total,
                           float* reduced) const {
  const PowerSgdTensor& tensor = tensors_[block.tensor];
  const std::vector<float> local_right = PaddedRight(block, local.right);
  const std::vector<float> total_right = PaddedRight(block, total.right);
  const int64_t left = left_begin_[block.tensor] + block.row;
  Tile product;
  product.width = Padded(block.columns);
  ForEachTile(block, [&](Tile* rest, int64_t row) {
    product.rows = rest->rows;
    std::fill_n(product.values, product.rows * product.width, 0.0f);
    AddProduct({local.left + left + row, tensor.rows}, {local_right.data(), product.width},
               tensor.rank, -1, rest);
    AddProduct({total.left + left + row, tensor.rows}, {total_right.data(), product.width},
               tensor.rank, 1, &product);
    for (int64_t i = 0; i < rest->rows; ++i) {
      const int64_t at = (block.row + row + i) * tensor.columns + block.column;
      std::copy_n(rest->values + i * rest->width, block.columns, tensor.residual + at);
      std::copy_n(product.values + i * product.width, block.columns, reduced + at);
    }
  });
}

std::vector<char> PowerSgd::TooLarge(const float* left, const float* total) const {
  std::vector<char> too_large(tensors_.size(), false);
  for (size_t i = 0; i < tensors_.size() && std::isfinite(left[0]); ++i) {
    too_large[i] =
        !AllFinite(left + left_begin_[i], tensors_[i].left_size()) || !CanMultiply(i, total);
  }
  return too_large;
}

void PowerSgd::Keep(const std::vector<char>& too_large) const {
  ForEachBlock([&](int64_t, const Block& block, const PowerSgdTensor& tensor) {
    const int64_t at = block.row * tensor.columns + block.column;
    if (too_large[block.tensor]) {
      for (int64_t i = 0; i < block.rows; ++i) {
        std::fill_n(tensor.residual + at + i * tensor.columns, block.columns, 0.0f);
      }
      return;
    }
    AddRows(tensor.residual + at, GradientAt(tensor, at), tensor.type, block.rows, block.columns,
            tensor.columns, tensor.residual + at, tensor.columns);
  });
}

void PowerSgd::StoreFactors(const float* total, const std::vector<float*>& factors) const {
  const IeeeArithmetic ieee;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const PowerSgdTensor& tensor = tensors_[i];
    StoreColumns(total + right_begin_[i], tensor.columns, tensor.factor_columns, tensor.rank,
                 factors[i]);
  }
}

}  // namespace gradcomp
