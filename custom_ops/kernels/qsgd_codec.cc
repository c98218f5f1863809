#include "qsgd_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "pack_bits.h"
#include "philox.h"
#include "simd.h"

namespace gradcomp {
namespace {

constexpr int64_t kScaleWords = 2;
constexpr int64_t kChunk = CodeChunk::kSize;

int64_t WordsOf(int64_t size, const QsgdSettings& settings) {
  return kScaleWords * CeilDiv(size, settings.bucket_size) + PackedWords(size, settings.bits);
}

int64_t BlockSizeOf(int64_t bucket_size) {
  return std::max<int64_t>(1, kBlockSize / bucket_size) * bucket_size;
}

// Calls work(words, begin, end) for each bucket of a block.
template <typename Word, typename BucketWork>
void ForEachBucket(const Codec& codec, const QsgdSettings& settings, int64_t block, Word* words,
                   const BucketWork& work) {
  const int64_t bucket_words = WordsOf(settings.bucket_size, settings);
  const int64_t end = codec.BlockEnd(block);
  for (int64_t begin = codec.BlockBegin(block); begin < end; begin += settings.bucket_size) {
    work(words + begin / settings.bucket_size * bucket_words, begin,
         std::min(begin + settings.bucket_size, end));
  }
}

// Calls work(levels, begin, size) for each chunk of a bucket, with the words of its levels.
template <typename Word, typename ChunkWork>
void ForEachChunk(Word* words, int64_t begin, int64_t end, int bits, const ChunkWork& work) {
  words += kScaleWords;
  for (; begin < end; begin += kChunk, words += PackedWords(kChunk, bits)) {
    work(words, begin, std::min(kChunk, end - begin));
  }
}

// A level of a bucket represents the value minimum + unit * level.
struct Scale {
  float minimum;
  float unit;
};
static_assert(sizeof(Scale) == kScaleWords * sizeof(int32_t), "it lies so in payloads");

Scale LoadScale(const int32_t* words) {
  Scale scale;
  std::memcpy(&scale, words, sizeof scale);
  return scale;
}

float ValueOf(const Scale& scale, float level) { return scale.minimum + scale.unit * level; }

// Maps floats to integers of the same order; infinities and NaNs are at the ends.
int32_t Ordered(float value) {
  const int32_t bits = static_cast<int32_t>(ToBits(value));
  return bits ^ (bits >> 31 & 0x7fffffff);
}

float FromOrdered(int32_t ordered) {
  return FromBits(static_cast<uint32_t>(ordered ^ (ordered >> 31 & 0x7fffffff)));
}

struct Range {
  int32_t smallest = std::numeric_limits<int32_t>::max();
  int32_t largest = std::numeric_limits<int32_t>::min();

  bool IsFinite() const {
    return smallest > Ordered(FromBits(kSignBit | kInfinityBits)) &&
           largest < Ordered(FromBits(kInfinityBits));
  }
};

constexpr Vectorized Extend{[](const float* values, int64_t size, Range* range) GRADCOMP_INLINED {
  Range all = *range;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t value = Ordered(values[i]);
    all.smallest = std::min(all.smallest, value);
    all.largest = std::max(all.largest, value);
  }
  *range = all;
}};

// Values are clipped to this limit, so that no difference or sum of sent values overflows.
constexpr float kLimit = 0x1p126f;

float LastLevel(int bits) { return static_cast<float>((1 << bits) - 1); }

Scale ScaleOf(const Range& range, int bits) {
  const float smallest = std::clamp(FromOrdered(range.smallest), -kLimit, kLimit);
  const float largest = std::clamp(FromOrdered(range.largest), -kLimit, kLimit);
  const float minimum = smallest + 0.0f;  // never -0
  return {minimum, (largest - minimum) / LastLevel(bits)};
}

// Sends each value as the level below or above it, and keeps the rest. Offsets round up
// with a probability equal to the value's position between the levels. If the inverse is infinite, the position of the minimum is NaN, which is not above 0.
constexpr Vectorized SendLevels{[](const float* values, const float* offsets, int64_t size,
                                   Scale scale, float last_level, uint8_t* levels,
                                   float* residual) GRADCOMP_INLINED {
  const float inverse = 1 / scale.unit;
  for (int64_t i = 0; i < size; ++i) {
    const float position = (values[i] - scale.minimum) * inverse + offsets[i];
    const float above = position > 0 ? position : 0;
    const int32_t level = static_cast<int32_t>(above < last_level ? above : last_level);
    levels[i] = static_cast<uint8_t>(level);
    residual[i] = values[i] - ValueOf(scale, static_cast<float>(level));
  }
}};

constexpr Vectorized AddLevels{[](const uint8_t* levels, int64_t size, Scale scale,
                                  float* values) GRADCOMP_INLINED {
  for (int64_t i = 0; i < size; ++i) values[i] += ValueOf(scale, static_cast<float>(levels[i]));
}};

constexpr Vectorized ToOffsets{[](const Philox::Word* random, int64_t size,
                                  float* offsets) GRADCOMP_INLINED {
  const char* from = reinterpret_cast<const char*>(random);
  for (int64_t i = 0; i < size; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    offsets[i] = (static_cast<float>(bits) + 0.5f) * 0x1p-16f;
  }
}};

// Random offsets of elements: the middles of 2^16 steps from 0 to 1.
class Offsets {
 public:
  explicit Offsets(const Turn& turn) : turn_(turn), philox_(0, turn.replica) {}

  // Returns the offsets of a chunk that begins with element `begin`, a multiple of kPerCounter.
  const float* Of(int64_t begin, int64_t size) {
    const Philox philox = philox_;  // a local copy, so that compilers move much of it out of the loop
    const int64_t first = begin / kPerCounter + 1;
    const int64_t count = CeilDiv(size, kPerCounter);
    Philox::Word random[kChunk / kPerWord];
    for (int64_t i = 0; i < count; ++i) {
      philox.Generate(first + i, turn_.tensor, turn_.step, 0, random + i * Philox::kWords);
    }
    ToOffsets(random, size, offsets_);
    return offsets_;
  }

 private:
  static constexpr int64_t kPerWord = sizeof(Philox::Word) / sizeof(uint16_t);
  static constexpr int64_t kPerCounter = Philox::kWords * kPerWord;

  const Turn turn_;
  const Philox philox_;
  float offsets_[kChunk];
};

class QsgdEncoder : public TensorEncoder {
 public:
  QsgdEncoder(const QsgdCodec& codec, const QsgdSettings& settings, const Source& source,
              const Turn& turn, int32_t* words)
      : TensorEncoder(2),
        codec_(codec),
        settings_(settings),
        source_(source),
        turn_(turn),
        words_(words) {}

  void RunBlock(int pass, int64_t block) override {
    Offsets offsets(turn_);
    ForEachBucket(codec_, settings_, block, words_, [&](int32_t* words, int64_t begin, int64_t end) {
      if (pass == 0) {
        Measure(words, begin, end);
      } else {
        Send(words, begin, end, &offsets);
      }
    });
  }

 private:
  void Measure(int32_t* words, int64_t begin, int64_t end) {
    Range range;
    for (; begin < end; begin += kChunk) {
      const int64_t size = std::min(kChunk, end - begin);
      float values[kChunk];
      Accumulate(source_, begin, size, values);
      Extend(values, size, &range);
    }
    if (!range.IsFinite()) return SetNotFinite();
    const Scale scale = ScaleOf(range, settings_.bits);
    std::memcpy(words, &scale, sizeof scale);
  }

  void Send(int32_t* words, int64_t begin, int64_t end, Offsets* offsets) const {
    const int bits = settings_.bits;
    const Scale scale = LoadScale(words);
    ForEachChunk(words, begin, end, bits, [&](int32_t* levels, int64_t first, int64_t size) {
      float values[kChunk];
      Accumulate(source_, first, size, values);
      CodeChunk chunk;
      SendLevels(values, offsets->Of(first, size), size, scale, LastLevel(bits), chunk.codes(),
                 source_.residual + first);
      chunk.Pack(size, bits, levels);
    });
  }

  const QsgdCodec& codec_;
  const QsgdSettings settings_;
  const Source source_;
  const Turn turn_;
  int32_t* const words_;
};

constexpr int64_t kSumLanes = 8;  // independent partial sums, which overlap in time

// Returns the expected square of a value's rounding error in SendLevels.
GRADCOMP_PART double SquaredError(float value, Scale scale, float inverse, float last_level) {
  const float position = (value - scale.minimum) * inverse;
  const float above = position > 0 ? position : 0;
  const float within = above < last_level ? above : last_level;
  const float level = static_cast<float>(static_cast<int32_t>(within));
  const double down = value - ValueOf(scale, level);
  const double up = value - ValueOf(scale, level + 1);
  const double share = within - level;
  return (1 - share) * (down * down) + share * (up * up);
}

constexpr Vectorized kSumOfSquaredErrors{[](const float* values, int64_t size, Scale scale,
                                            float last_level) GRADCOMP_INLINED {
  const float inverse = 1 / scale.unit;
  double lanes[kSumLanes] = {};
  int64_t begin = 0;
  for (; begin + kSumLanes <= size; begin += kSumLanes) {
    for (int64_t lane = 0; lane < kSumLanes; ++lane) {
      lanes[lane] += SquaredError(values[begin + lane], scale, inverse, last_level);
    }
  }
  for (int64_t lane = 0; begin < size; ++lane, ++begin) {
    lanes[lane] += SquaredError(values[begin], scale, inverse, last_level);
  }
  return std::accumulate(std::begin(lanes), std::end(lanes), 0.0);
}};

Status CheckBucket(const int32_t* words, int64_t size, int bits) {
  const Scale scale = LoadScale(words);
  if (ToBits(scale.unit) >= kInfinityBits ||
      !IsFiniteMagnitude(MagnitudeBits(ValueOf(scale, LastLevel(bits))))) {
    return {Concat("minimum ", scale.minimum, " and unit ", scale.unit,
                   "; expected a unit that is not negative, and finite values")};
  }
  return CheckPadding(words + kScaleWords, size, bits);
}

}  // namespace

QsgdCodec::QsgdCodec(int64_t size, const QsgdSettings& settings)
    : Codec(size, WordsOf(size, settings), BlockSizeOf(settings.bucket_size)),
      settings_(settings) {}

std::unique_ptr<TensorEncoder> QsgdCodec::NewEncoder(const Source& source, const Turn& turn,
                                                     int32_t* words) const {
  return std::make_unique<QsgdEncoder>(*this, settings_, source, turn, words);
}

Status QsgdCodec::Check(const int32_t* words) const {
  Status status;
  for (int64_t block = 0; block < num_blocks(); ++block) {
    ForEachBucket(*this, settings_, block, words,
                  [&](const int32_t* bucket, int64_t begin, int64_t end) {
                    if (!status.ok()) return;
                    status = CheckBucket(bucket, end - begin, settings_.bits);
                    if (status.ok()) return;
                    status.message = Concat("bucket ", begin / settings_.bucket_size, ": ",
                                            status.message);
                  });
  }
  return status;
}

double QsgdError(const float* values, int64_t size, const QsgdSettings& settings,
                 const ParallelFor& parallel_for) {
  std::vector<double> of_buckets(CeilDiv(size, settings.bucket_size));
  parallel_for(of_buckets.size(), settings.bucket_size, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      const float* first = values + bucket * settings.bucket_size;
      const int64_t count = std::min(settings.bucket_size, values + size - first);
      Range range;
      Extend(first, count, &range);
      const Scale scale = ScaleOf(range, settings.bits);
      const float last_level = LastLevel(settings.bits);
      of_buckets[bucket] = kSumOfSquaredErrors(first, count, scale, last_level);
    }
  });
  return std::sqrt(std::accumulate(of_buckets.begin(), of_buckets.end(), 0.0));
}

double QsgdCodec::LargestMagnitude(const int32_t* words) const {
  double largest = 0;
  for (int64_t block = 0; block < num_blocks(); ++block) {
    ForEachBucket(*this, settings_, block, words, [&](const int32_t* bucket, int64_t, int64_t) {
      const Scale scale = LoadScale(bucket);
      const double first = std::fabs(scale.minimum);
      const double last = std::fabs(ValueOf(scale, LastLevel(settings_.bits)));
      largest = std::max({largest, first, last});
    });
  }
  return largest;
}

void QsgdCodec::AddBlock(const int32_t* words, int64_t block, float* values) const {
  const int bits = settings_.bits;
  ForEachBucket(*this, settings_, block, words,
                [&](const int32_t* bucket, int64_t begin, int64_t end) {
                  const Scale scale = LoadScale(bucket);
                  ForEachChunk(bucket, begin, end, bits,
                               [&](const int32_t* levels, int64_t first, int64_t size) {
                                 CodeChunk chunk;
                                 chunk.Unpack(levels, size, bits);
                                 AddLevels(chunk.codes(), size, scale, values + first);
                               });
                });
}

}  // namespace gradcomp
