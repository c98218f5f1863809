// Helpers of AdaComp's GPU kernels: codes, pieces of tensors, and additions to residuals.
// docs/payload_format.md has the layout.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_DEVICE_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_DEVICE_H_

#include "adacomp_tables.h"
#include "device.h"

namespace gradcomp::gpu {

constexpr unsigned kNegative = 2;
constexpr unsigned kLastInBin = 1;

__device__ inline unsigned EscapeIndex(int code_bytes) { return code_bytes == 1 ? 63 : 16383; }

__device__ inline unsigned LoadCode(const unsigned char* codes, int code_bytes, long long i) {
  if (code_bytes == 1) return codes[i];
  // Codes of two bytes are aligned in a payload.
  return reinterpret_cast<const unsigned short*>(codes)[i];
}

__device__ inline void StoreCode(unsigned code, int code_bytes, long long i, unsigned char* codes) {
  if (code_bytes == 1) {
    codes[i] = static_cast<unsigned char>(code);
  } else {
    reinterpret_cast<unsigned short*>(codes)[i] = static_cast<unsigned short>(code);
  }
}

__device__ inline int OwnLane() { return threadIdx.x % kLanes; }

// Returns the index of this warp in the launch.
__device__ inline long long OwnWarp() {
  return static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
}

// The codes of a lane: every 32nd code, followed by zeros.
template <int kCodes>
struct Codes {
  unsigned at[kCodes];
  unsigned bin[kCodes];
  unsigned first;  // index of the first code
  unsigned end;    // index after the last code of all lanes

  __device__ unsigned Number(int i) const { return first + i * kLanes; }
  __device__ bool Has(int i) const { return Number(i) < end; }
};

// Visits the codes of whole bins by visit(Codes<kCodes>). All lanes of a warp must call this
// together.
template <int kCodes, typename Visit>
__device__ void ForCodes(const unsigned char* codes, unsigned num_codes, int code_bytes,
                         const Visit& visit) {
  const unsigned lanes_before = (1u << OwnLane()) - 1;
  unsigned bin = 0;
  for (unsigned begin = 0; begin < num_codes; begin += kLanes * kCodes) {
    Codes<kCodes> own;
    own.first = begin + OwnLane();
    own.end = num_codes;
    for (int i = 0; i < kCodes; ++i) {
      own.at[i] = own.Has(i) ? LoadCode(codes, code_bytes, own.Number(i)) : 0;
    }
    for (int i = 0; i < kCodes; ++i) {
      const unsigned ends = __ballot_sync(kAllLanes, own.at[i] & kLastInBin);
      own.bin[i] = bin + __popc(ends & lanes_before);
      bin += __popc(ends);
    }
    visit(own);
  }
}

// Adds scale * sign to the element of each code. No two codes of a payload have the same element,
// so all elements are read before any is written.
template <int kCodes>
__device__ void AddCodes(const Codes<kCodes>& own, int code_bytes, unsigned scale_bits,
                         unsigned bin_size, float* values) {
  unsigned places[kCodes];
  bool sends[kCodes];
  float sums[kCodes];
  for (int i = 0; i < kCodes; ++i) {
    const unsigned index = own.at[i] >> 2;
    sends[i] = own.Has(i) && index != EscapeIndex(code_bytes);
    places[i] = own.bin[i] * bin_size + index;
    if (sends[i]) sums[i] = values[places[i]];
  }
  for (int i = 0; i < kCodes; ++i) {
    const unsigned addend = scale_bits ^ (own.at[i] & kNegative) << 30;
    if (sends[i]) values[places[i]] = __fadd_rn(sums[i], __uint_as_float(addend));
  }
}

// Consecutive whole bins in a block of a tensor.
struct Piece {
  long long tensor;
  long long index;  // in its tensor
  long long first_bin;
  long long begin;  // element
  int num_bins;
  int size;  // elements
};

__device__ inline long long Least(long long a, long long b) { return a < b ? a : b; }

// As LastUpTo, by all lanes of a warp together, which seldom wait for memory.
__device__ inline long long TensorOf(const EncodeStep& step, long long piece) {
  long long begin = 0;
  for (long long count = step.num_tensors; count > 1;) {
    const long long stride = (count + kLanes - 1) / kLanes;
    const long long own = OwnLane() * stride;
    const bool up_to = own < count && step.tensors[begin + own].first_piece <= piece;
    const long long last = (__popc(__ballot_sync(kAllLanes, up_to)) - 1) * stride;
    begin += last;
    count = Least(count - last, stride);
  }
  return begin;
}

// All lanes of a warp must call this together.
__device__ inline Piece FindPiece(const EncodeStep& step, long long piece) {
  const long long number = TensorOf(step, piece);
  const EncodeTensor& tensor = step.tensors[number];
  const long long index = piece - tensor.first_piece;
  // A launch has fewer than 2^31 blocks, and a division of 64 bits is slow.
  const unsigned per_block = static_cast<unsigned>(tensor.pieces_per_block);
  const long long block = static_cast<unsigned>(index) / per_block;
  const long long first_bin = block * tensor.bins_per_block +
                              static_cast<unsigned>(index) % per_block * tensor.bins_per_piece;
  const long long end_bin = Least(tensor.num_bins, (block + 1) * tensor.bins_per_block);
  const long long num_bins = Least(tensor.bins_per_piece, end_bin - first_bin);
  const long long begin = first_bin * tensor.bin_size;
  return {number, index, first_bin, begin, static_cast<int>(num_bins),
          static_cast<int>(Least(num_bins * tensor.bin_size, tensor.size - begin))};
}

// Returns the value that was added to a residual, and restores the second moment if there is one.
// The value is the gradient, divided if there is a second moment.
__device__ inline float TakeBack(const EncodeTensor& tensor, long long i) {
  const float value = LoadGradient(tensor.gradient, tensor.gradient_type, i);
  if (!tensor.second_moment) return value;
  const float moment = tensor.second_moment[i];
  const float square = tensor.squares ? tensor.squares[i] : __fmul_rn(value, value);
  const float rounding = __fmul_rn(__uint_as_float(0x35000000u), moment);  // 2^-21
  const float share = __fmul_rn(tensor.adam.share, square);
  const float before = __fsub_rn(__fsub_rn(moment, share), rounding);
  tensor.second_moment[i] = __fdiv_rn(0 < before ? before : 0.0f, tensor.adam.decay);
  return Quotient(value, moment, tensor.adam);
}

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_DEVICE_H_
