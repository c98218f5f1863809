// QSGD on a GPU, with the same bits as kernels/qsgd_codec.cc and whole_codec.cc.
//
//   gradcomp_qsgd_measure  a block for each piece   minimum and unit of its buckets; is all finite?
//   gradcomp_qsgd_send     a block for each slice   writes levels; updates the residual
//
// Decoding is one launch, with a block for each slice. The payloads have been checked.
#include "../kernels/philox.h"
#include "fixed_device.h"
#include "qsgd_tables.h"

namespace gradcomp::gpu {

constexpr int kLowest = -0x7fffffff - 1;
constexpr int kGroup = 32;  // levels of a bucket that fill whole words, for any number of bits
constexpr int kOffsetBits = 16;
constexpr int kOffsetsPerWord = 64 / kOffsetBits;

// Maps floats to integers of the same order; infinities and NaNs are at the ends.
__device__ inline int Ordered(float value) {
  const int bits = static_cast<int>(__float_as_uint(value));
  return bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ inline float FromOrdered(int ordered) {
  return __uint_as_float(static_cast<unsigned>(ordered ^ (ordered >> 31 & 0x7fffffff)));
}

// Clips a value, so that no difference or sum of sent values overflows.
__device__ inline float Limited(float value) {
  const float limit = __uint_as_float(0x7e800000u);  // 2^126
  return value < -limit ? -limit : limit < value ? limit : value;
}

__device__ inline float LastLevel(int bits) { return static_cast<float>((1 << bits) - 1); }

__device__ inline float ValueOf(const QsgdScale& scale, unsigned level) {
  return __fadd_rn(scale.minimum, __fmul_rn(scale.unit, static_cast<float>(level)));
}

__device__ inline QsgdScale ScaleOf(int smallest, int largest, int bits) {
  const float minimum = __fadd_rn(Limited(FromOrdered(smallest)), 0.0f);  // never -0
  const float range = __fsub_rn(Limited(FromOrdered(largest)), minimum);
  return {minimum, __fdiv_rn(range, LastLevel(bits))};
}

// kWidth threads share a bucket.
template <int kWidth>
__device__ void MeasureInPiece(const QsgdEncodeStep& step, const QsgdTensor& tensor,
                               long long piece) {
  const long long bucket = piece * (kThreads / kWidth) + threadIdx.x / kWidth;
  const long long begin = bucket * tensor.bucket_size;
  const long long end =
      begin + tensor.bucket_size < tensor.size ? begin + tensor.bucket_size : tensor.size;
  int largest = kLowest;
  int negated = kLowest;  // the largest ~value, from the smallest value
  for (long long i = begin + threadIdx.x % kWidth; i < end; i += kWidth) {
    const int value = Ordered(FixedSum(tensor, i));
    largest = value > largest ? value : largest;
    negated = ~value > negated ? ~value : negated;
  }
  largest = Maximum<kWidth>(largest);
  negated = Maximum<kWidth>(negated);
  if (threadIdx.x % kWidth != 0 || begin >= tensor.size) return;
  const int infinity = static_cast<int>(kInfinity);
  if (largest >= infinity || negated >= infinity) {  // ~ maps negative infinity to this, too
    atomicExch(step.not_finite, 1);
  } else if (!tensor.sent_whole) {
    step.scales[tensor.first_bucket + bucket] = ScaleOf(~negated, largest, tensor.bits);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_qsgd_measure(QsgdEncodeStep step) {
  const long long number = LastUpTo(step.tensors, step.num_tensors, &QsgdTensor::first_piece,
                                    static_cast<long long>(blockIdx.x));
  const QsgdTensor& tensor = step.tensors[number];
  if (tensor.width == kLanes) {
    MeasureInPiece<kLanes>(step, tensor, blockIdx.x - tensor.first_piece);
  } else {
    MeasureInPiece<kThreads>(step, tensor, blockIdx.x - tensor.first_piece);
  }
}

struct InBucket {
  long long bucket;
  unsigned index;
};

// Finds the buckets of a slice's elements, with a single division of large numbers.
class Buckets {
 public:
  __device__ Buckets(const QsgdTensor& tensor, const Slice& slice)
      : size_(static_cast<unsigned>(tensor.bucket_size)),
        first_(slice.begin / tensor.bucket_size),
        index_(static_cast<unsigned>(slice.begin % tensor.bucket_size)) {}

  // Finds the bucket of an element of the slice.
  __device__ InBucket Find(unsigned i) const {
    return {first_ + (index_ + i) / size_, (index_ + i) % size_};
  }

 private:
  const unsigned size_;
  const long long first_;
  const unsigned index_;  // index of the slice's first element
};

__device__ inline long long WordsBefore(const QsgdTensor& tensor, long long bucket) {
  return bucket * (kScaleWords + tensor.bucket_size / kGroup * tensor.bits);
}

// Returns the offset, from 16 random bits, that is added before values are rounded down.
__device__ inline float OffsetOf(const unsigned long long* random, int i) {
  const unsigned long long word = random[i / kOffsetsPerWord];
  const unsigned bits = word >> i % kOffsetsPerWord * kOffsetBits & ((1u << kOffsetBits) - 1);
  return __fmul_rn(__fadd_rn(static_cast<float>(bits), 0.5f), __uint_as_float(0x37800000u));  // 2^-16
}

__device__ inline void Draw(const QsgdEncodeStep& step, const Slice& slice,
                            unsigned long long* random) {
  constexpr int kPerCounter = Philox::kWords * kOffsetsPerWord;
  const Philox philox(0, step.replica);
  const long long first = slice.begin / kPerCounter + 1;
  const int count = static_cast<int>((slice.end - slice.begin + kPerCounter - 1) / kPerCounter);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    philox.Generate(first + i, slice.tensor, step.step, 0, random + i * Philox::kWords);
  }
}

// Returns the level below or above a value. If the inverse of the unit is infinite, the position of
// the minimum is NaN, which is not above 0.
__device__ inline unsigned LevelOf(float value, const QsgdScale& scale, float offset, int bits) {
  const float inverse = __fdiv_rn(1.0f, scale.unit);
  const float position =
      __fadd_rn(__fmul_rn(__fsub_rn(value, scale.minimum), inverse), offset);
  const float above = position > 0 ? position : 0;
  const float last = LastLevel(bits);
  return static_cast<unsigned>(above < last ? above : last);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) gradcomp_qsgd_send(QsgdEncodeStep step) {
  __shared__ unsigned long long random[kSliceElements / kOffsetsPerWord];
  __shared__ unsigned char levels[kSliceElements];
  if (*step.not_finite) return;
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const QsgdTensor& tensor = step.tensors[slice.tensor];
  int* words = step.body + tensor.first_word;
  if (tensor.sent_whole) return SendWhole(tensor, slice, words);
  Draw(step, slice, random);
  __syncthreads();
  const Buckets buckets(tensor, slice);
  const int size = static_cast<int>(slice.end - slice.begin);
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const InBucket in = buckets.Find(i);
    const QsgdScale scale = step.scales[tensor.first_bucket + in.bucket];
    const float value = FixedSum(tensor, slice.begin + i);
    const unsigned level = LevelOf(value, scale, OffsetOf(random, i), tensor.bits);
    levels[i] = static_cast<unsigned char>(level);
    tensor.values[slice.begin + i] = __fsub_rn(value, ValueOf(scale, level));
    if (in.index != 0) continue;
    int* bucket = words + WordsBefore(tensor, in.bucket);
    bucket[0] = static_cast<int>(__float_as_uint(scale.minimum));
    bucket[1] = static_cast<int>(__float_as_uint(scale.unit));
  }
  __syncthreads();
  const int num_words = (size * tensor.bits + 31) / 32;
  for (int i = threadIdx.x; i < num_words; i += kThreads) {
    const int begin = i / tensor.bits * kGroup;
    const int word = i % tensor.bits;
    const InBucket in = buckets.Find(begin);
    int* group = words + WordsBefore(tensor, in.bucket) + kScaleWords +
                 in.index / kGroup * tensor.bits;
    const int count = size - begin < kGroup ? size - begin : kGroup;
    const unsigned packed = PackedWord(
        word, tensor.bits, count, [&](int code) -> unsigned { return levels[begin + code]; });
    group[word] = static_cast<int>(packed);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_qsgd_decode(QsgdDecodeStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const QsgdTensor& tensor = step.tensors[slice.tensor];
  if (tensor.sent_whole) return DecodeElements(step, slice, FloatAt());
  const Buckets buckets(tensor, slice);
  DecodeElements(step, slice, [&](const int* words, long long i) {
    const InBucket in = buckets.Find(static_cast<unsigned>(i - slice.begin));
    const int* bucket = words + WordsBefore(tensor, in.bucket);
    const QsgdScale scale = {FloatAt()(bucket, 0), FloatAt()(bucket, 1)};
    return ValueOf(scale, UnpackedCode(bucket + kScaleWords, in.index, tensor.bits));
  });
}

}  // namespace gradcomp::gpu
