// AdaComp's decoding on a GPU: what kernels/adacomp_decoder.cc does, to the bit, of spans that were
// checked. Two launches:
//   gradcomp_adacomp_index    a warp for each span   where the codes of each unit begin
//   gradcomp_adacomp_decode   a warp for each unit   adds up what the payloads say
#include "adacomp_vectors.h"

namespace gradcomp {
namespace gpu {

constexpr int kIndexedCodes = 8;  // of a lane at a time
constexpr int kDecodedCodes = 1;

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_index(DecodeStep step) {
  const long long number = OwnWarp();
  if (number >= step.num_blocks * step.num_payloads) return;
  const long long payload = number / step.num_blocks;
  const DecodeBlock& block = step.blocks[number % step.num_blocks];
  if (block.sent_whole) return;
  const DecodeSpan& span = step.spans[number];
  unsigned* starts = step.starts + payload * step.num_units + block.first_unit;
  if (OwnLane() == 0) starts[0] = 0;
  const unsigned per_unit = block.bins_per_unit;
  ForCodes<kIndexedCodes>(
      span.codes, span.num_codes, block.code_bytes, [&](const Codes<kIndexedCodes>& own) {
        unsigned unit = own.bin / per_unit + 1;
        unsigned rest = unit * per_unit - own.bin;  // bins in front of the unit
        for (int i = 0; i < kIndexedCodes; ++i) {
          if (!(own.at[i] & kLastInBin) || --rest > 0) continue;
          rest = per_unit;
          const unsigned start = own.number + i + 1;
          if (start < span.num_codes) starts[unit++] = start;
        }
      });
}

// Some bins of a block.
struct Unit {
  long long block;
  long long number;
  unsigned begin;  // element of the block
  unsigned size;
  bool is_last;    // of its block
};

__device__ inline Unit UnitOf(const DecodeStep& step, long long number) {
  const long long of = LastUpTo(step.blocks, step.num_blocks, &DecodeBlock::first_unit, number);
  const DecodeBlock& block = step.blocks[of];
  const unsigned size = block.bins_per_unit * block.bin_size;
  const unsigned begin = static_cast<unsigned>(number - block.first_unit) * size;
  const bool is_last = block.size - begin <= size;
  return {of, number, begin, is_last ? block.size - begin : size, is_last};
}

__device__ inline void DecodeWhole(const DecodeStep& step, const Unit& unit, float* values) {
  for (unsigned i = OwnLane(); i < unit.size; i += kLanes) {
    float sum = step.adds ? values[i] : 0.0f;
    for (int payload = 0; payload < step.num_payloads; ++payload) {
      const DecodeSpan& span = step.spans[payload * step.num_blocks + unit.block];
      if (!span.codes) continue;
      sum = __fadd_rn(sum, reinterpret_cast<const float*>(span.codes)[unit.begin + i]);
    }
    values[i] = sum;
  }
}

// Payload after payload, so that sums are in their order. That lanes wait for each other in between
// shows in no test: in the emulator, every operation of a warp orders memory.
__device__ inline void AddUnits(const DecodeStep& step, const Unit& unit, float* sums) {
  const DecodeBlock& block = step.blocks[unit.block];
  for (int payload = 0; payload < step.num_payloads; ++payload) {
    __syncwarp();
    const DecodeSpan& span = step.spans[payload * step.num_blocks + unit.block];
    if (!span.codes) continue;
    const unsigned* start = step.starts + payload * step.num_units + unit.number;
    const unsigned num_codes = (unit.is_last ? span.num_codes : start[1]) - start[0];
    const unsigned scale_bits = __float_as_uint(span.scale);
    ForCodes<kDecodedCodes>(
        span.codes + start[0] * block.code_bytes, num_codes, block.code_bytes,
        [&](const Codes<kDecodedCodes>& own) {
          AddCodes(own, block.code_bytes, scale_bits, block.bin_size, sums);
        });
  }
  __syncwarp();
}

// Both in vectors, where they lie so in memory; the lanes of a warp together.
__device__ inline void Copy(const float* from, unsigned size, float* to) {
  const unsigned lane = OwnLane();
  const bool aligned = reinterpret_cast<unsigned long long>(to) % sizeof(Floats) == 0;
  const unsigned in_vectors = aligned ? size / kVector * kVector : 0;
  for (unsigned i = lane * kVector; i < in_vectors; i += kLanes * kVector) {
    *reinterpret_cast<Floats*>(to + i) = *reinterpret_cast<const Floats*>(from + i);
  }
  for (unsigned i = in_vectors + lane; i < size; i += kLanes) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_decode(DecodeStep step) {
  __shared__ Floats of_warps[kWarps][kUnitElements / kVector];
  const long long number = OwnWarp();
  if (number >= step.num_units) return;
  const Unit unit = UnitOf(step, number);
  const DecodeBlock& block = step.blocks[unit.block];
  float* values = block.values + unit.begin;
  if (block.sent_whole) return DecodeWhole(step, unit, values);
  if (step.adds || unit.size > kUnitElements) {
    for (unsigned i = OwnLane(); !step.adds && i < unit.size; i += kLanes) values[i] = 0;
    return AddUnits(step, unit, values);
  }
  Floats* vectors = of_warps[threadIdx.x / kLanes];
  for (unsigned i = OwnLane(); i * kVector < unit.size; i += kLanes) vectors[i] = {};
  AddUnits(step, unit, vectors->at);
  Copy(vectors->at, unit.size, values);
}

}  // namespace gpu
}  // namespace gradcomp
