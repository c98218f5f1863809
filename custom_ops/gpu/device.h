// Helpers of all GPU kernels, in CUDA C++. NVRTC compiles this file without any include, and g++
// compiles it after tests/gpu_emulator.h. All arithmetic uses intrinsics, which no compiler
// contracts under any flags.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_DEVICE_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_DEVICE_H_

#include "tables.h"

namespace gradcomp::gpu {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kInfinity = 0x7f800000u;
constexpr unsigned kQuietNaN = 0x7fc00000u;

enum { kFloat, kHalf, kBFloat16 };

__device__ inline unsigned Magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

__device__ inline float WidenHalf(unsigned bits) {
  const unsigned magnitude = bits & 0x7fffu;
  const unsigned exact = __float_as_uint(
      __fmul_rn(__uint_as_float(magnitude << 13), __uint_as_float(0x77800000u)));  // 2^112
  const unsigned not_finite = magnitude >= 0x7c00u ? kInfinity : 0;
  return __uint_as_float((bits & 0x8000u) << 16 | exact | not_finite);
}

// Widens a number of 16 bits to float32.
__device__ inline float Widen(unsigned bits, int type) {
  return type == kHalf ? WidenHalf(bits) : __uint_as_float(bits << 16);
}

__device__ inline float LoadGradient(const void* gradient, int type, long long i) {
  if (type == kFloat) return static_cast<const float*>(gradient)[i];
  return Widen(static_cast<const unsigned short*>(gradient)[i], type);
}

__device__ inline bool AreFinite(float value, float square) {
  return Magnitude(value) < kInfinity && Magnitude(square) < kInfinity;
}

// Adam's second moment after a step, and the division by its root.
__device__ inline float MovedMoment(float moment, float square, float share) {
  return __fadd_rn(moment, __fmul_rn(share, __fsub_rn(square, moment)));
}
__device__ inline float Quotient(float value, float moment, const Adam& adam) {
  const float root = __fmul_rn(adam.root_of_scale, __fsqrt_rn(moment));
  return __fdiv_rn(value, __fadd_rn(root, adam.epsilon));
}

// Returns the last of `count` entries whose `first` is at most `i`.
template <typename Entry, typename Member>
__device__ long long LastUpTo(const Entry* entries, long long count, Member first, long long i) {
  long long begin = 0;
  for (long long end = count; end - begin > 1;) {
    const long long middle = (begin + end) / 2;
    if (entries[middle].*first <= i) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The elements of a tensor that a CUDA block processes; tensors have a `first_slice` and a `size`.
struct Slice {
  long long tensor;
  long long begin;
  long long end;
};

template <typename Tensor>
__device__ Slice FindSlice(const Tensor* tensors, long long num_tensors, long long slice) {
  const long long tensor = LastUpTo(tensors, num_tensors, &Tensor::first_slice, slice);
  const long long begin = (slice - tensors[tensor].first_slice) * kSliceElements;
  const long long end = begin + kSliceElements;
  const long long size = tensors[tensor].size;
  return {tensor, begin, end < size ? end : size};
}

template <typename Value>
struct Scanned {
  Value before;  // the sum over the threads before this thread
  Value total;
};

// Scans the values of the lanes of a warp, or of all threads, which must call this together. Only
// for integers, whose sums do not depend on the order.
template <typename Value>
__device__ Scanned<Value> WarpScan(Value value) {
  const int lane = threadIdx.x % kLanes;
  Value sum = value;
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const Value below = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += below;
  }
  return {sum - value, __shfl_sync(kAllLanes, sum, kLanes - 1)};
}
template <typename Value, int kBlockThreads = kThreads>
__device__ Scanned<Value> BlockScan(Value value) {
  constexpr int kBlockWarps = kBlockThreads / kLanes;
  __shared__ Value of_warps[kBlockWarps];
  const int lane = threadIdx.x % kLanes;
  const Scanned<Value> in_warp = WarpScan(value);
  __syncthreads();  // the call before may still read of_warps
  if (lane == 0) of_warps[threadIdx.x / kLanes] = in_warp.total;
  __syncthreads();
  const Scanned<Value> warps = WarpScan(lane < kBlockWarps ? of_warps[lane] : Value(0));
  const Value before = __shfl_sync(kAllLanes, warps.before, threadIdx.x / kLanes);
  return {before + in_warp.before, warps.total};
}

// Sums the values of the lanes of a warp, or of all threads, which must call this together. The
// order is fixed. The first lane or thread gets the sum.
__device__ inline double WarpSum(double value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = __dadd_rn(value, __shfl_down_sync(kAllLanes, value, distance));
  }
  return value;
}
__device__ inline double BlockSum(double value) {
  __shared__ double of_warps[kWarps];
  value = WarpSum(value);
  __syncthreads();
  if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = value;
  __syncthreads();
  double sum = 0;
  for (int i = 0; i < kWarps; ++i) sum = __dadd_rn(sum, of_warps[i]);
  return sum;
}

template <typename Value>
__device__ Value WarpMax(Value value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Value other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// Returns the maximum over `kWidth` consecutive threads: one thread, a warp, or all threads. All
// threads must call this together.
template <int kWidth, typename Value>
__device__ Value Maximum(Value value) {
  __shared__ Value of_warps[kWarps];
  if (kWidth >= kLanes) value = WarpMax(value);
  if (kWidth <= kLanes) return value;
  __syncthreads();  // the call before may still read of_warps
  if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = value;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) value = of_warps[i] > value ? of_warps[i] : value;
  return value;
}

// Returns word number `word` of `count` packed codes of `bits` bits; see kernels/pack_bits.h.
// code(i) returns a code.
template <typename Integer, typename Code>
__device__ unsigned PackedWord(Integer word, Integer bits, Integer count, const Code& code) {
  unsigned packed = 0;
  for (Integer i = 32 * word / bits; i < count; ++i) {
    const Integer at = i * bits - 32 * word;
    if (at >= 32) break;
    packed |= at >= 0 ? code(i) << at : code(i) >> -at;
  }
  return packed;
}

// Returns code number `i` of packed codes of 1 to 32 bits.
__device__ inline unsigned UnpackedCode(const int* packed, long long i, long long bits) {
  const int* words = packed + i * bits / 32;
  const int shift = static_cast<int>(i * bits % 32);
  unsigned long long both = static_cast<unsigned>(words[0]);
  if (shift + bits > 32) {
    both |= static_cast<unsigned long long>(static_cast<unsigned>(words[1])) << 32;
  }
  return static_cast<unsigned>(both >> shift & ((1ull << bits) - 1));
}

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_DEVICE_H_
