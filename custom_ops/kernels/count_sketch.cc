#include "count_sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "floats.h"
#include "largest.h"
#include "simd.h"

namespace gradcomp {
namespace {

constexpr int64_t kHashed = 1 << 10;  // entries whose hashes stay in the cache
constexpr int64_t kMaxColumns = 1 << 30;
constexpr int64_t kCyclesPerHash = 4;

// The words of consecutive entries, whose highest bits are their signs, and their columns.
struct SketchHashes {
  uint32_t words[kHashed];
  int32_t columns[kHashed];
};

// Philox 4x32-10 (Salmon et al., see philox.h), as TensorFlow numbers its words. The loop is over
// the counters, so that compilers make vector instructions of each round.
constexpr Vectorized DrawWords{[](uint64_t counter, uint64_t step, uint32_t* words)
                                   GRADCOMP_INLINED {
  constexpr uint32_t kCounters = kHashed / 4;
  uint32_t a[kCounters];
  uint32_t b[kCounters];
  uint32_t c[kCounters];
  uint32_t d[kCounters];
  for (uint32_t i = 0; i < kCounters; ++i) {
    a[i] = static_cast<uint32_t>(counter) + i;  // has no carry
    b[i] = static_cast<uint32_t>(counter >> 32);
    c[i] = static_cast<uint32_t>(step);
    d[i] = static_cast<uint32_t>(step >> 32);
  }
  for (uint32_t round = 0; round < 10; ++round) {
    const uint32_t key0 = round * 0x9e3779b9;
    const uint32_t key1 = round * 0xbb67ae85;
    for (uint32_t i = 0; i < kCounters; ++i) {
      const uint64_t first = uint64_t{0xd2511f53} * a[i];
      const uint64_t second = uint64_t{0xcd9e8d57} * c[i];
      a[i] = static_cast<uint32_t>(second >> 32) ^ b[i] ^ key0;
      b[i] = static_cast<uint32_t>(second);
      c[i] = static_cast<uint32_t>(first >> 32) ^ d[i] ^ key1;
      d[i] = static_cast<uint32_t>(first);
    }
  }
  for (uint32_t i = 0; i < kCounters; ++i) {
    words[4 * i] = a[i];
    words[4 * i + 1] = b[i];
    words[4 * i + 2] = c[i];
    words[4 * i + 3] = d[i];
  }
}};

// Computes the lower 31 bits modulo the number of columns. The rounded quotient is off by at most
// one.
constexpr Vectorized FindColumns{[](const uint32_t* words, int32_t num_columns,
                                    int32_t* columns) GRADCOMP_INLINED {
  const double inverse = 1.0 / num_columns;
  for (int64_t i = 0; i < kHashed; ++i) {
    const int32_t number = static_cast<int32_t>(words[i] & ~kSignBit);
    const int32_t quotient = static_cast<int32_t>(number * inverse);
    int32_t rest = static_cast<int32_t>(static_cast<uint32_t>(number) -
                                        static_cast<uint32_t>(quotient) *
                                            static_cast<uint32_t>(num_columns));
    rest += rest < 0 ? num_columns : 0;
    rest -= rest >= num_columns ? num_columns : 0;
    columns[i] = rest;
  }
}};

// Writes the medians of 3 vectors over the first.
constexpr Vectorized TakeMedians{[](float* a, const float* b, const float* c) GRADCOMP_INLINED {
  for (int64_t i = 0; i < kHashed; ++i) {
    const float low = std::min(a[i], b[i]);
    const float high = std::max(a[i], b[i]);
    a[i] = std::max(low, std::min(high, c[i]));
  }
}};

// `begin` is a multiple of kHashed.
void HashEntries(const SketchSettings& settings, int64_t row, int64_t begin,
                 SketchHashes* hashes) {
  const uint64_t counter = (static_cast<uint64_t>(row) << 40) + static_cast<uint64_t>(begin / 4);
  DrawWords(counter, settings.step, hashes->words);
  FindColumns(hashes->words, static_cast<int32_t>(settings.columns), hashes->columns);
}

float WithSign(float value, uint32_t word) { return FromBits(ToBits(value) ^ (word & kSignBit)); }

void SketchRow(const SketchSettings& settings, int64_t row, const float* values, int64_t size,
               float* sums) {
  SketchHashes hashes;
  std::fill_n(sums, settings.columns, 0.0f);
  for (int64_t begin = 0; begin < size; begin += kHashed) {
    HashEntries(settings, row, begin, &hashes);
    const int64_t end = std::min(kHashed, size - begin);
    for (int64_t i = 0; i < end; ++i) {
      sums[hashes.columns[i]] += WithSign(values[begin + i], hashes.words[i]);
    }
  }
}

// Estimates up to kHashed entries from `begin` on.
void EstimateStrip(const SketchSettings& settings, const float* sums, int64_t begin, int64_t size,
                   float* estimates) {
  SketchHashes hashes;
  float of_rows[kSketchRows][kHashed];
  for (int64_t row = 0; row < kSketchRows; ++row) {
    HashEntries(settings, row, begin, &hashes);
    const float* of_row = sums + row * settings.columns;
    for (int64_t i = 0; i < kHashed; ++i) {
      of_rows[row][i] = WithSign(of_row[hashes.columns[i]], hashes.words[i]);
    }
  }
  TakeMedians(of_rows[0], of_rows[1], of_rows[2]);
  std::copy_n(of_rows[0], size, estimates);
}

}  // namespace

Status CheckSketch(const SketchSettings& settings) {
  if (settings.columns < 1 || settings.columns > kMaxColumns) {
    return {Concat("columns is ", settings.columns, "; expected 1 to ", kMaxColumns)};
  }
  return {};
}

void Sketch(const SketchSettings& settings, const float* values, int64_t size,
            const ParallelFor& parallel_for, float* sums) {
  parallel_for(kSketchRows, kCyclesPerHash * size, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t row = begin; row < end; ++row) {
      SketchRow(settings, row, values, size, sums + row * settings.columns);
    }
  });
}

void LargestOfSketch(const SketchSettings& settings, const float* sums, int64_t size,
                     int64_t count, const ParallelFor& parallel_for, float* estimates,
                     int32_t* places) {
  using Entry = LargestEntries::Entry;
  std::vector<float> known(sums, sums + kSketchRows * settings.columns);
  for (float& sum : known) {
    if (std::isnan(sum)) sum = std::numeric_limits<float>::infinity();
  }
  LargestEntries largest({estimates, nullptr, GradientType::kFloat}, size, count);
  const int64_t cost = kSketchRows * kCyclesPerHash * LargestEntries::kBlockSize;
  parallel_for(largest.num_blocks(), cost, [&](int64_t first, int64_t last) {
    const IeeeArithmetic ieee;
    for (int64_t block = first; block < last; ++block) {
      const int64_t end = std::min(size, (block + 1) * LargestEntries::kBlockSize);
      for (int64_t i = block * LargestEntries::kBlockSize; i < end; i += kHashed) {
        EstimateStrip(settings, known.data(), i, std::min(kHashed, end - i), estimates + i);
      }
      largest.Count(block);
    }
  });
  largest.EndCount();
  parallel_for(largest.num_blocks(), LargestEntries::kBlockSize, [&](int64_t first, int64_t last) {
    const IeeeArithmetic ieee;
    for (int64_t block = first; block < last; ++block) {
      largest.Collect(block, [](int64_t, int64_t, const float*) {});
    }
  });
  std::vector<Entry> chosen;
  largest.Finish([&](const Entry& entry) { chosen.push_back(entry); });
  std::stable_sort(chosen.begin(), chosen.end(), [](const Entry& a, const Entry& b) {
    return MagnitudeBits(a.value) > MagnitudeBits(b.value);
  });
  for (const Entry& entry : chosen) *places++ = static_cast<int32_t>(entry.index);
}

}  // namespace gradcomp
