#include "power_sgd_alternating.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace gradcomp {
namespace {

template <typename Value>
std::vector<Value> AtNumbers(const std::vector<Value>& all, const std::vector<int64_t>& numbers) {
  std::vector<Value> some;
  for (int64_t i : numbers) some.push_back(all[i]);
  return some;
}

}  // namespace

AlternatingPowerSgd::AlternatingPowerSgd(const std::vector<PowerSgdTensor>& tensors,
                                         const std::vector<float*>& factors, int64_t step,
                                         const ParallelFor& parallel_for)
    : tensors_(tensors), factors_(factors) {
  const IeeeArithmetic ieee;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto known = [](float value) { return value != 0; };
    sends_right_.push_back(tensors_[i].rank > 0 && std::any_of(factors_[i], RightOf(i), known));
    (sends_right_[i] ? right_numbers_ : left_numbers_).push_back(i);
  }
  lefts_ = std::make_unique<PowerSgd>(AtNumbers(tensors_, left_numbers_), parallel_for);
  rights_ = std::make_unique<PowerSgd>(AtNumbers(tensors_, right_numbers_), parallel_for);
  std::mt19937 random(static_cast<uint32_t>(step));  // portable
  const auto take = [&](const float* factor, int64_t rows, const PowerSgdTensor& tensor,
                        float* columns) {
    TakeColumns(factor, rows, tensor.factor_columns, tensor.rank, &random, columns);
    OrthonormalizeColumns(rows, tensor.rank, columns);
    return columns + tensor.rank * rows;
  };
  known_rights_.resize(lefts_->right_size());
  float* columns = known_rights_.data();
  for (int64_t i : left_numbers_) {
    columns = take(RightOf(i), tensors_[i].columns, tensors_[i], columns);
  }
  known_lefts_.resize(rights_->left_size());
  columns = known_lefts_.data() + 1;
  for (int64_t i : right_numbers_) {
    columns = take(factors_[i], tensors_[i].rows, tensors_[i], columns);
  }
}

float* AlternatingPowerSgd::RightOf(int64_t tensor) const {
  return factors_[tensor] + tensors_[tensor].rows * tensors_[tensor].factor_columns;
}

int64_t AlternatingPowerSgd::sent_size(int64_t tensor) const {
  return sends_right_[tensor] ? tensors_[tensor].right_size() : tensors_[tensor].left_size();
}

template <typename Work>
void AlternatingPowerSgd::ForEachTensor(const Work& work) const {
  int64_t begin = 1;
  for (const std::vector<int64_t>* numbers : {&left_numbers_, &right_numbers_}) {
    for (int64_t i : *numbers) {
      work(i, begin);
      begin += sent_size(i);
    }
  }
}

bool AlternatingPowerSgd::Fits(int64_t tensor, const float* sent) const {
  const int64_t rank = tensors_[tensor].rank;
  const int64_t size = sent_size(tensor);
  return rank == 0 ? AllFinite(sent, size) : CanMultiplyColumns(size / rank, rank, sent);
}

bool AlternatingPowerSgd::Project(float* local) const {
  bool finite = lefts_->ComputeLeft(known_rights_, local);
  finite &= rights_->ComputeRight(known_lefts_.data(), local + lefts_->left_size());
  local[0] = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  ForEachTensor([&](int64_t tensor, int64_t begin) {
    if (!Fits(tensor, local + begin)) local[begin] = std::numeric_limits<float>::quiet_NaN();
  });
  return finite;
}

bool AlternatingPowerSgd::CanReduce(const float* total) const {
  bool fits = std::isfinite(total[0]);
  ForEachTensor([&](int64_t tensor, int64_t begin) {
    fits = fits && Fits(tensor, total + begin);
  });
  return fits;
}

void AlternatingPowerSgd::Reduce(const float* local, const float* total,
                                 const std::vector<float*>& reduced) const {
  const int64_t rights = lefts_->left_size();  // the offset of the right factors
  lefts_->Reduce({local, known_rights_.data()}, {total, known_rights_.data()},
                 AtNumbers(reduced, left_numbers_));
  rights_->Reduce({known_lefts_.data(), local + rights}, {known_lefts_.data(), total + rights},
                  AtNumbers(reduced, right_numbers_));
  Store(total);
}

void AlternatingPowerSgd::Store(const float* total) const {
  const IeeeArithmetic ieee;
  ForEachTensor([&](int64_t i, int64_t begin) {
    const PowerSgdTensor& tensor = tensors_[i];
    const int64_t stride = tensor.factor_columns;
    std::fill_n(factors_[i], (tensor.rows + tensor.columns) * stride, 0.0f);
    float* sent = sends_right_[i] ? RightOf(i) : factors_[i];
    const int64_t rows = sends_right_[i] ? tensor.columns : tensor.rows;
    StoreColumns(total + begin, rows, stride, tensor.rank, sent);
  });
}

void AlternatingPowerSgd::Keep(const float* total) const {
  std::vector<char> too_large(tensors_.size(), false);
  ForEachTensor([&](int64_t tensor, int64_t begin) {
    too_large[tensor] = std::isfinite(total[0]) && !Fits(tensor, total + begin);
  });
  lefts_->Keep(AtNumbers(too_large, left_numbers_));
  rights_->Keep(AtNumbers(too_large, right_numbers_));
}

}  // namespace gradcomp
