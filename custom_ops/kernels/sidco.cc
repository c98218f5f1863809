#include "sidco.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "floats.h"
#include "simd.h"

namespace gradcomp {
namespace {

constexpr double kFirstDensity = 0.25;     // of the first of several stages
constexpr int64_t kFewestElements = 1024;  // of a tensor whose threshold is estimated
constexpr int64_t kLeastCap = 64;
constexpr int kCorrections = 3;  // of the last threshold
constexpr int kLanes = 8;

// The number of magnitudes, and sums of their differences from a shift and of the squares of these.
struct Sums {
  double count = 0;
  double first = 0;
  double second = 0;
};

// Adds up the magnitudes above a threshold.
constexpr Vectorized AddUp{
    [](const float* values, int64_t size, float threshold, double shift) GRADCOMP_INLINED {
      double count[kLanes] = {};
      double first[kLanes] = {};
      double second[kLanes] = {};
      const auto add = [&](int64_t i, int64_t lane) GRADCOMP_INLINED {
        const float magnitude = std::fabs(values[i]);
        const double difference = magnitude > threshold ? magnitude - shift : 0.0;
        count[lane] += magnitude > threshold ? 1.0 : 0.0;
        first[lane] += difference;
        second[lane] += difference * difference;
      };
      const int64_t whole = size - size % kLanes;
      for (int64_t i = 0; i < whole; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
      }
      for (int64_t i = whole; i < size; ++i) add(i, i - whole);
      Sums total;
      for (int lane = 0; lane < kLanes; ++lane) {
        total.count += count[lane];
        total.first += first[lane];
        total.second += second[lane];
      }
      return total;
    }};

constexpr Vectorized CountAbove{
    [](const float* values, int64_t size, float threshold) GRADCOMP_INLINED {
      int32_t count = 0;
      for (int64_t i = 0; i < size; ++i) count += std::fabs(values[i]) > threshold;
      return count;
    }};

// Values, whose magnitudes are fitted in parallel. Results do not depend on the threads.
class Sample {
 public:
  Sample(const float* values, int64_t size, const ParallelFor& parallel_for)
      : values_(values), size_(size), parallel_for_(&parallel_for) {}

  Sums SumsAbove(float threshold, double shift) const {
    const auto of_blocks = OfBlocks<Sums>([&](int64_t begin, int64_t size) {
      return AddUp(values_ + begin, size, threshold, shift);
    });
    Sums total;
    for (const Sums& block : of_blocks) {
      total.count += block.count;
      total.first += block.first;
      total.second += block.second;
    }
    return total;
  }

  int64_t NumAbove(float threshold) const {
    const auto of_blocks = OfBlocks<int32_t>([&](int64_t begin, int64_t size) {
      return CountAbove(values_ + begin, size, threshold);
    });
    int64_t total = 0;
    for (int32_t block : of_blocks) total += block;
    return total;
  }

  std::vector<float> MagnitudesAbove(float threshold) const {
    return Above<float>(threshold, [&](int64_t i) { return std::fabs(values_[i]); });
  }

  std::vector<int32_t> PlacesAbove(float threshold) const {
    return Above<int32_t>(threshold, [](int64_t i) { return static_cast<int32_t>(i); });
  }

  // Returns the first magnitude above 0, or 0.
  float FirstPositive() const {
    const float* end = values_ + size_;
    const float* first = std::find_if(values_, end, [](float value) { return value != 0; });
    return first == end ? 0.0f : std::fabs(*first);
  }

 private:
  template <typename Result, typename DoBlock>
  std::vector<Result> OfBlocks(const DoBlock& work) const {
    std::vector<Result> results(CeilDiv(size_, kBlockSize));
    (*parallel_for_)(results.size(), kBlockSize, [&](int64_t first, int64_t last) {
      const IeeeArithmetic ieee;
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kBlockSize;
        results[block] = work(begin, std::min(kBlockSize, size_ - begin));
      }
    });
    return results;
  }

  // Returns item(i) for each value whose magnitude is above a threshold.
  template <typename Item, typename Make>
  std::vector<Item> Above(float threshold, const Make& item) const {
    const auto of_blocks = OfBlocks<std::vector<Item>>([&](int64_t begin, int64_t size) {
      std::vector<Item> found(size + 1);  // each item is written before its check
      Item* next = found.data();
      for (int64_t i = begin; i < begin + size; ++i) {
        *next = item(i);
        next += std::fabs(values_[i]) > threshold;
      }
      return std::vector<Item>(found.data(), next);
    });
    std::vector<Item> all;
    for (const auto& block : of_blocks) all.insert(all.end(), block.begin(), block.end());
    return all;
  }

  const float* values_;
  int64_t size_;
  const ParallelFor* parallel_for_;
};

// Returns the threshold that a share of a fitted distribution exceeds, generalized Pareto by matched
// moments; not finite if nothing fits.
double Quantile(const Sums& sums, double shift, double share) {
  const double mean = shift + sums.first / sums.count;
  const double log = std::log(share);
  const double variance = (sums.second - sums.first * sums.first / sums.count) / (sums.count - 1);
  if (!(variance > 0)) return std::numeric_limits<double>::quiet_NaN();
  const double ratio = mean * mean / variance;
  const double shape = (ratio - 1) / 2;
  const double scale = mean * (ratio + 1) / 2;
  if (std::fabs(shape) < 1e-4) return -scale * log * (1 + shape * log / 2);
  return -scale * std::expm1(shape * log) / shape;
}

double LogOfCount(double count) { return std::log(std::max(count, 0.5)); }

// Moves the threshold towards one that the wanted number of the sample exceed. Between two
// thresholds, the logarithm of the number is taken as linear, as it is for exponential magnitudes.
// Returns the threshold with the best number. All `count` magnitudes are at least `lowest`.
float Corrected(const Sample& sample, double count, float lowest, float threshold, double wanted) {
  struct Point {
    double threshold;
    double log_count;
  };
  const double goal = std::log(wanted);
  const auto error = [&](const Point& point) { return std::fabs(point.log_count - goal); };
  Point low = {lowest, LogOfCount(count)};
  Point high = low;
  Point best = low;
  for (int i = 0; i < 1 + kCorrections; ++i) {
    const Point here = {threshold, LogOfCount(sample.NumAbove(threshold))};
    if (error(here) < error(best)) best = here;
    const bool too_many = here.log_count > goal;
    const Point there = too_many ? high : low;
    (too_many ? low : high) = here;
    const double slope = (there.threshold - here.threshold) / (there.log_count - here.log_count);
    const float moved = here.threshold + slope * (goal - here.log_count);
    if (std::isfinite(moved)) threshold = moved;
  }
  return best.threshold;
}

// Returns a number of fits with which each stage after the first keeps at least a tenth.
int64_t StagesFor(double density) {
  return 1 + std::max<int64_t>(0, std::ceil(std::log10(kFirstDensity / density)));
}

float Threshold(double density, const Sample& all, int64_t size,
                const ParallelFor& parallel_for) {
  const double wanted = density * size;
  const int64_t stages = StagesFor(density);
  std::vector<float> magnitudes;
  Sample sample = all;
  double count = 0;
  float lowest = 0;
  float threshold = 0;
  for (int64_t left = stages; left > 0; --left) {
    const bool first = left == stages;
    std::vector<float> above = first ? std::vector<float>() : sample.MagnitudesAbove(threshold);
    const Sample fitted = first ? all : Sample(above.data(), above.size(), parallel_for);
    const float least = first || above.empty() ? 0 : *std::min_element(above.begin(), above.end());
    // The differences from any magnitude have the same variance, and little cancels.
    const double shift = first ? all.FirstPositive() : least;
    const Sums sums = fitted.SumsAbove(first ? 0 : -1, shift);
    if (first) count = sums.count;
    if (sums.count <= std::max(wanted, 1.0)) break;
    // The paper's code fixes the share of each stage, so that errors of stages multiply.
    double share = std::pow(wanted / sums.count, 1.0 / left);
    if (first && stages > 1) share = std::max(wanted / sums.count, kFirstDensity);
    const float estimate = least + Quantile(sums, shift - least, share);
    if (!std::isfinite(estimate)) break;
    magnitudes.swap(above);  // which moves no values
    std::tie(sample, count, lowest, threshold) = std::tuple(fitted, sums.count, least, estimate);
  }
  return Corrected(sample, count, lowest, threshold, wanted);
}

// Keeps the largest; of equal ones, the first.
void KeepLargest(const float* values, int64_t most, std::vector<int32_t>* places) {
  if (static_cast<int64_t>(places->size()) <= most) return;
  std::nth_element(places->begin(), places->begin() + most, places->end(), [&](int a, int b) {
    const uint32_t of_a = MagnitudeBits(values[a]);
    const uint32_t of_b = MagnitudeBits(values[b]);
    return of_a != of_b ? of_a > of_b : a < b;
  });
  places->resize(most);
  std::sort(places->begin(), places->end());
}

}  // namespace

Status CheckDensity(double density) {
  if (density > 0 && density < 1) return {};
  return {Concat("density is ", density, "; expected a number above 0 and below 1")};
}

std::vector<int32_t> ChooseBySidco(double density, const float* values, int64_t size,
                                   const ParallelFor& parallel_for) {
  const IeeeArithmetic ieee;
  const Sample all(values, size, parallel_for);
  const bool few = size < kFewestElements;
  const double wanted = density * size;
  int64_t most = few ? std::max(1.0, std::nearbyint(wanted))
                     : std::max<int64_t>(std::floor(2 * wanted), kLeastCap);
  std::vector<int32_t> places =
      all.PlacesAbove(few ? 0 : Threshold(density, all, size, parallel_for));
  if (places.empty()) {
    places = all.PlacesAbove(0);
    most = 1;
  }
  KeepLargest(values, most, &places);
  return places;
}

}  // namespace gradcomp
