// Top-k on a GPU, with the same bits as kernels/top_k_codec.cc and whole_codec.cc.
//
// These kernels find the magnitude of the last sent entry digit by digit, as on the CPU:
// gradcomp_top_k_count a block for each slice a histogram of the digit; at first, is all finite?
// gradcomp_top_k_pick a block for each tensor the digit of the last sent entry and then
// gradcomp_top_k_tally a block for each slice the numbers of larger and of equal entries
// gradcomp_top_k_places a block for each tensor the place of each slice's entries
// gradcomp_top_k_send a block for each slice writes entries; updates the residual
//
// Decoding is one launch, with a block for each slice. The payloads have been checked.
#include "fixed_device.h"
#include "top_k_tables.h"

namespace gradcomp::gpu {

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_top_k_count(TopKEncodeStep step) {
  __shared__ unsigned histogram[kTopKDigits];
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const TopKTensor& tensor = step.tensors[slice.tensor];
  for (int digit = threadIdx.x; digit < kTopKDigits; digit += kThreads) histogram[digit] = 0;
  __syncthreads();
  const unsigned magnitude = step.last[slice.tensor].magnitude;
  bool finite = true;
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    const unsigned own = Magnitude(FixedSum(tensor, i));
    finite = finite && own < kInfinity;
    const unsigned digit = (own - magnitude) >> step.shift;  // too large for smaller magnitudes
    if (digit < static_cast<unsigned>(step.num_digits)) atomicAdd(&histogram[digit], 1u);
  }
  if (!finite) atomicExch(step.not_finite, 1);
  __syncthreads();
  unsigned long long* all = step.histograms + slice.tensor * kTopKDigits;
  for (int digit = threadIdx.x; digit < step.num_digits; digit += kThreads) {
    if (histogram[digit] > 0) {
      atomicAdd(&all[digit], static_cast<unsigned long long>(histogram[digit]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_top_k_pick(TopKEncodeStep step) {
  constexpr int kOwn = kTopKDigits / kThreads;
  unsigned long long* histogram = step.histograms + static_cast<long long>(blockIdx.x) * kTopKDigits;
  // Goes from the largest digit down; digits that this pass lacks have a count of 0.
  const int first = kTopKDigits - 1 - static_cast<int>(threadIdx.x) * kOwn;
  long long counts[kOwn];
  long long sum = 0;
  for (int i = 0; i < kOwn; ++i) {
    counts[i] = static_cast<long long>(histogram[first - i]);
    histogram[first - i] = 0;
    sum += counts[i];
  }
  const TopKLast last = step.last[blockIdx.x];
  long long above = BlockScan(sum).before;
  for (int i = 0; i < kOwn; ++i) {
    if (above < last.rank && last.rank <= above + counts[i]) {
      const unsigned digit = static_cast<unsigned>(first - i);
      step.last[blockIdx.x] = {last.magnitude + (digit << step.shift), last.rank - above};
    }
    above += counts[i];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_top_k_tally(TopKEncodeStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const TopKTensor& tensor = step.tensors[slice.tensor];
  const unsigned magnitude = step.last[slice.tensor].magnitude;
  int above = 0;
  int equal = 0;
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    const unsigned own = Magnitude(FixedSum(tensor, i));
    above += own > magnitude;
    equal += own == magnitude;
  }
  above = BlockScan(above).total;
  equal = BlockScan(equal).total;
  if (threadIdx.x == 0) step.counts[blockIdx.x] = {above, equal};
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_top_k_places(TopKEncodeStep step) {
  const TopKTensor& tensor = step.tensors[blockIdx.x];
  const long long num_slices = (tensor.size + kSliceElements - 1) / kSliceElements;
  TopKCounts before = {0, 0};
  for (long long first = 0; first < num_slices; first += kThreads) {
    const bool is_one = first + threadIdx.x < num_slices;
    TopKCounts* own = step.counts + tensor.first_slice + first + threadIdx.x;
    const Scanned<long long> above = BlockScan<long long>(is_one ? own->above : 0);
    const Scanned<long long> equal = BlockScan<long long>(is_one ? own->equal : 0);
    if (is_one) *own = {before.above + above.before, before.equal + equal.before};
    before = {before.above + above.total, before.equal + equal.total};
  }
}

__device__ inline void SendLargest(const TopKTensor& tensor, const Slice& slice,
                                   const TopKLast& last, TopKCounts before, int* words) {
  constexpr unsigned kAbove = 1u << 16;  // packs two counts into one number
  for (long long begin = slice.begin; begin < slice.end; begin += kThreads) {
    const long long i = begin + threadIdx.x;
    const bool is_one = i < slice.end;
    const float sum = is_one ? FixedSum(tensor, i) : 0.0f;
    const bool above = is_one && Magnitude(sum) > last.magnitude;
    const bool equal = is_one && Magnitude(sum) == last.magnitude;
    const Scanned<unsigned> scanned = BlockScan((above ? kAbove : 0u) + (equal ? 1u : 0u));
    const long long equal_before = before.equal + scanned.before % kAbove;
    const bool sent = above || (equal && equal_before < last.rank);
    if (sent) {
      const long long equal_sent = equal_before < last.rank ? equal_before : last.rank;
      const long long entry = before.above + scanned.before / kAbove + equal_sent;
      words[entry] = static_cast<int>(static_cast<unsigned>(i));
      words[tensor.entries + entry] = static_cast<int>(__float_as_uint(sum));
    }
    if (is_one) tensor.values[i] = sent ? 0.0f : sum;
    before.above += scanned.total / kAbove;
    before.equal += scanned.total % kAbove;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_top_k_send(TopKEncodeStep step) {
  if (*step.not_finite) return;
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const TopKTensor& tensor = step.tensors[slice.tensor];
  int* words = step.body + tensor.first_word;
  if (tensor.sent_whole) {
    SendWhole(tensor, slice, words);
  } else {
    SendLargest(tensor, slice, step.last[slice.tensor], step.counts[blockIdx.x], words);
  }
}

// Returns the position of the first of the ascending indices that is at least `index`.
__device__ inline long long FirstFrom(const int* indices, long long count, long long index) {
  long long begin = 0;
  for (long long end = count; begin < end;) {
    const long long middle = (begin + end) / 2;
    if (static_cast<unsigned>(indices[middle]) < index) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

__device__ inline const int* WordsOf(const TopKDecodeStep& step, const TopKTensor& tensor,
                                     int payload) {
  return step.bodies + payload * step.row_words + tensor.first_word;
}

// Adds the payloads' entries of a slice to its `sums`.
__device__ inline void AddEntries(const TopKDecodeStep& step, const TopKTensor& tensor,
                                  const Slice& slice, float* sums) {
  // The number of payloads whose entries of the slice are searched in parallel, because each search
  // takes long.
  constexpr int kParallelSearches = kThreads / 2;
  __shared__ long long bounds[kParallelSearches][2];
  for (int first = 0; first < step.num_payloads; first += kParallelSearches) {
    __syncthreads();  // all threads have read the bounds before
    const int own = threadIdx.x / 2;
    const int side = threadIdx.x % 2;
    if (first + own < step.num_payloads) {
      bounds[own][side] = FirstFrom(WordsOf(step, tensor, first + own), tensor.entries,
                                    side == 0 ? slice.begin : slice.end);
    }
    for (int i = 0; i < kParallelSearches && first + i < step.num_payloads; ++i) {
      __syncthreads();  // sums are in the order of the payloads
      const int* words = WordsOf(step, tensor, first + i);
      for (long long entry = bounds[i][0] + threadIdx.x; entry < bounds[i][1]; entry += kThreads) {
        float* sum = sums + (static_cast<unsigned>(words[entry]) - slice.begin);
        *sum = __fadd_rn(*sum, FloatAt()(words, tensor.entries + entry));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_top_k_decode(TopKDecodeStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const TopKTensor& tensor = step.tensors[slice.tensor];
  if (tensor.sent_whole) return DecodeElements(step, slice, FloatAt());
  __shared__ float of_slice[kSliceElements];
  float* sums = step.adds ? tensor.values + slice.begin : of_slice;
  const int size = static_cast<int>(slice.end - slice.begin);
  if (!step.adds) {
    for (int i = threadIdx.x; i < size; i += kThreads) sums[i] = 0;
  }
  AddEntries(step, tensor, slice, sums);
  if (step.adds) return;
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += kThreads) tensor.values[slice.begin + i] = sums[i];
}

}  // namespace gradcomp::gpu
