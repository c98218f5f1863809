// Decodes AdaComp's payloads on a GPU, with the same bits as kernels/adacomp_decoder.cc. The spans
// have been checked. A launch has a CUDA block for each block of a tensor. The CUDA block finds
// where the codes of each unit begin, and each of its warps sums one unit over the payloads.
#include "adacomp_vectors.h"

namespace gradcomp::gpu {

constexpr int kIndexedCodes = 16;  // per thread, at a time
constexpr int kDecodedCodes = 2;   // per lane, at a time

// In shared memory: the index of each unit's first code among a payload's codes for the block. A
// block has at most one code for each element.
using Starts = unsigned short[kPayloadsAtOnce][kBlockUnits];

// All threads must call this function together.
__device__ inline void FindStarts(const DecodeBlock& block, const DecodeSpan& span,
                                  unsigned short* starts) {
  const unsigned per_unit = block.bins_per_unit;
  unsigned bin = 0;
  if (threadIdx.x == 0) starts[0] = 0;
  for (unsigned first = 0; first < span.num_codes; first += kThreads * kIndexedCodes) {
    const unsigned number = first + threadIdx.x * kIndexedCodes;
    unsigned ends = 0;  // a bit for each code that is the last in its bin
    for (int i = 0; i < kIndexedCodes; ++i) {
      const bool has = number + i < span.num_codes;
      const unsigned code = has ? LoadCode(span.codes, block.code_bytes, number + i) : 0;
      ends |= (code & kLastInBin) << i;
    }
    const Scanned<unsigned> scanned = BlockScan<unsigned>(__popc(ends));
    const unsigned own_bin = bin + scanned.before;
    unsigned unit = own_bin / per_unit + 1;
    unsigned rest = unit * per_unit - own_bin;  // bins in front of the unit
    for (; ends != 0; ends &= ends - 1) {
      if (--rest > 0) continue;
      rest = per_unit;
      const unsigned start = number + __ffs(static_cast<int>(ends));
      if (start < span.num_codes) starts[unit++] = static_cast<unsigned short>(start);
    }
    bin += scanned.total;
  }
}

// Some bins of a block.
struct Unit {
  unsigned begin;  // element
  unsigned size;
  bool is_last;
};

__device__ inline Unit UnitOf(const DecodeBlock& block, unsigned number) {
  const unsigned size = block.bins_per_unit * block.bin_size;
  const unsigned begin = number * size;
  const bool is_last = block.size - begin <= size;
  return {begin, is_last ? block.size - begin : size, is_last};
}

// The payloads of a block that are decoded together.
struct Payloads {
  const DecodeSpan* spans;  // the block's span in the first payload
  long long stride;         // from one payload to the next
  int count;

  __device__ const DecodeSpan& operator[](int i) const { return spans[i * stride]; }
};

__device__ inline void DecodeWhole(const DecodeBlock& block, const Payloads& payloads, bool adds) {
  for (unsigned i = threadIdx.x; i < block.size; i += kThreads) {
    float sum = adds ? block.values[i] : 0.0f;
    for (int payload = 0; payload < payloads.count; ++payload) {
      const DecodeSpan& span = payloads[payload];
      if (span.codes) sum = __fadd_rn(sum, reinterpret_cast<const float*>(span.codes)[i]);
    }
    block.values[i] = sum;
  }
}

// Adds one payload after another, so that sums have the order of the payloads. No test covers the
// synchronization of lanes in between, because every warp operation of the emulator orders memory.
__device__ inline void AddUnit(const DecodeBlock& block, const Payloads& payloads,
                               const Starts& starts, unsigned number, bool is_last, float* sums) {
  for (int payload = 0; payload < payloads.count; ++payload) {
    __syncwarp();
    const DecodeSpan& span = payloads[payload];
    if (!span.codes) continue;
    const unsigned start = starts[payload][number];
    const unsigned end = is_last ? span.num_codes : starts[payload][number + 1];
    const unsigned scale_bits = __float_as_uint(span.scale);
    ForCodes<kDecodedCodes>(span.codes + start * block.code_bytes, end - start, block.code_bytes,
                            [&](const Codes<kDecodedCodes>& own) {
                              AddCodes(own, block.code_bytes, scale_bits, block.bin_size, sums);
                            });
  }
  __syncwarp();
}

// Copies in vectors if both arrays are aligned. All lanes of a warp must call this together.
__device__ inline void Copy(const float* from, unsigned size, float* to) {
  const unsigned lane = OwnLane();
  const bool aligned = reinterpret_cast<unsigned long long>(to) % sizeof(Floats) == 0;
  const unsigned in_vectors = aligned ? size / kVector * kVector : 0;
  for (unsigned i = lane * kVector; i < in_vectors; i += kLanes * kVector) {
    *reinterpret_cast<Floats*>(to + i) = *reinterpret_cast<const Floats*>(from + i);
  }
  for (unsigned i = in_vectors + lane; i < size; i += kLanes) to[i] = from[i];
}

__device__ inline void DecodeUnits(const DecodeBlock& block, const Payloads& payloads, bool adds) {
  __shared__ Starts starts;
  __shared__ Floats of_warps[kWarps][kUnitElements / kVector];
  for (int payload = 0; payload < payloads.count; ++payload) {
    FindStarts(block, payloads[payload], starts[payload]);
  }
  __syncthreads();
  const unsigned num_units = (block.size - 1) / (block.bins_per_unit * block.bin_size) + 1;
  const unsigned warp = threadIdx.x / kLanes;
  Floats* vectors = of_warps[warp];
  for (unsigned number = warp; number < num_units; number += kWarps) {
    const Unit unit = UnitOf(block, number);
    float* values = block.values + unit.begin;
    if (adds || unit.size > kUnitElements) {
      for (unsigned i = OwnLane(); !adds && i < unit.size; i += kLanes) values[i] = 0;
      AddUnit(block, payloads, starts, number, unit.is_last, values);
    } else {
      for (unsigned i = OwnLane(); i * kVector < unit.size; i += kLanes) vectors[i] = {};
      AddUnit(block, payloads, starts, number, unit.is_last, vectors->at);
      Copy(vectors->at, unit.size, values);
      __syncwarp();  // another lane may write the same element for the next unit
    }
  }
  __syncthreads();  // before the starts are overwritten
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) gradcomp_adacomp_decode(DecodeStep step) {
  const DecodeBlock block = step.blocks[blockIdx.x];
  for (int first = 0; first < step.num_payloads; first += kPayloadsAtOnce) {
    const int rest = step.num_payloads - first;
    const Payloads payloads = {step.spans + first * step.num_blocks + blockIdx.x, step.num_blocks,
                               rest < kPayloadsAtOnce ? rest : kPayloadsAtOnce};
    const bool adds = step.adds || first > 0;
    if (block.sent_whole) {
      DecodeWhole(block, payloads, adds);
    } else {
      DecodeUnits(block, payloads, adds);
    }
  }
}

}  // namespace gradcomp::gpu
