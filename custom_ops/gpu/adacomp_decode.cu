// AdaComp's decoding on a GPU: what kernels/adacomp_decoder.cc does, to the bit, of spans that were
// checked. Two launches:
//   gradcomp_adacomp_index    a warp for each span   where the codes of each unit begin
//   gradcomp_adacomp_decode   a warp for each unit   adds up what the payloads say
#include "adacomp_device.h"

namespace gradcomp {
namespace gpu {

constexpr int kIndexedCodes = 16;  // of a lane at a time
constexpr int kDecodedCodes = 2;

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_index(DecodeStep step) {
  const long long number = OwnWarp();
  if (number >= step.num_blocks * step.num_payloads) return;
  const long long payload = number / step.num_blocks;
  const DecodeBlock& block = step.blocks[number % step.num_blocks];
  if (block.sent_whole) return;
  const DecodeSpan& span = step.spans[number];
  unsigned* starts = step.starts + payload * step.num_units + block.first_unit;
  if (threadIdx.x % kLanes == 0) starts[0] = 0;
  ForEachCode<kIndexedCodes>(
      span.codes, span.num_codes, block.code_bytes, [&](unsigned i, unsigned code, unsigned bin) {
        const unsigned next = bin + (code & kLastInBin);
        const unsigned unit = next / block.bins_per_unit;
        const bool begins = next > bin && next == unit * block.bins_per_unit;
        if (begins && i + 1 < span.num_codes) starts[unit] = i + 1;
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
  for (unsigned i = threadIdx.x % kLanes; i < unit.size; i += kLanes) {
    float sum = step.adds ? values[i] : 0.0f;
    for (int payload = 0; payload < step.num_payloads; ++payload) {
      const DecodeSpan& span = step.spans[payload * step.num_blocks + unit.block];
      if (!span.codes) continue;
      sum = __fadd_rn(sum, reinterpret_cast<const float*>(span.codes)[unit.begin + i]);
    }
    values[i] = sum;
  }
}

// Payload after payload, so that sums are in their order.
__device__ inline void AddUnits(const DecodeStep& step, const Unit& unit, float* sums) {
  const DecodeBlock& block = step.blocks[unit.block];
  for (int payload = 0; payload < step.num_payloads; ++payload) {
    __syncwarp();
    const DecodeSpan& span = step.spans[payload * step.num_blocks + unit.block];
    if (!span.codes) continue;
    const unsigned* start = step.starts + payload * step.num_units + unit.number;
    const unsigned num_codes = (unit.is_last ? span.num_codes : start[1]) - start[0];
    const unsigned scale_bits = __float_as_uint(span.scale);
    ForEachCode<kDecodedCodes>(
        span.codes + start[0] * block.code_bytes, num_codes, block.code_bytes,
        [&](unsigned, unsigned code, unsigned bin) {
          AddCode(code, block.code_bytes, scale_bits, sums + bin * block.bin_size);
        });
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_decode(DecodeStep step) {
  __shared__ float of_warps[kWarps][kUnitElements];
  const long long number = OwnWarp();
  if (number >= step.num_units) return;
  const Unit unit = UnitOf(step, number);
  const DecodeBlock& block = step.blocks[unit.block];
  float* values = block.values + unit.begin;
  if (block.sent_whole) return DecodeWhole(step, unit, values);
  const bool in_place = step.adds || unit.size > kUnitElements;
  float* sums = in_place ? values : of_warps[threadIdx.x / kLanes];
  if (!step.adds) {
    for (unsigned i = threadIdx.x % kLanes; i < unit.size; i += kLanes) sums[i] = 0;
  }
  AddUnits(step, unit, sums);
  if (in_place) return;
  for (unsigned i = threadIdx.x % kLanes; i < unit.size; i += kLanes) values[i] = sums[i];
}

}  // namespace gpu
}  // namespace gradcomp
