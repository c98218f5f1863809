// The chunks of ScaleCom and RandomK on a GPU, with the same bits as kernels/chunks.cc.
//
//   select: choose  a block for each piece of a tensor
//           pack    a thread for each word of the offsets
//   take:   take    a thread for each chunk
//   apply:  keep    a thread for each chunk: what its chosen place will keep
//           spread  a block for each slice of a tensor: adds the gradient, clears the output
//           place   a thread for each chunk: the total, and what is kept
#include "chunks_tables.h"
#include "device.h"

namespace gradcomp::gpu {

__device__ inline float ChunkSum(const ChunkTensor& tensor, long long i) {
  return __fadd_rn(tensor.residual[i], LoadGradient(tensor.gradient, tensor.gradient_type, i));
}

// Returns a number that is largest for the first of the largest magnitudes.
__device__ inline unsigned long long Rank(unsigned magnitude, unsigned offset) {
  return static_cast<unsigned long long>(magnitude) << 32 | ~offset;
}

// kWidth threads share a chunk.
template <int kWidth>
__device__ void ChooseInPiece(const ChunkStep& step, const ChunkTensor& tensor, long long piece) {
  const long long chunk = piece * (kThreads / kWidth) + threadIdx.x / kWidth;
  const long long begin = chunk * tensor.chunk_size;
  const long long end =
      begin + tensor.chunk_size < tensor.size ? begin + tensor.chunk_size : tensor.size;
  unsigned long long first = 0;
  for (long long place = begin + threadIdx.x % kWidth; place < end; place += kWidth) {
    const unsigned magnitude = Magnitude(ChunkSum(tensor, place));
    const unsigned long long rank = Rank(magnitude, static_cast<unsigned>(place - begin));
    first = rank > first ? rank : first;
  }
  first = Maximum<kWidth>(first);
  if (threadIdx.x % kWidth != 0 || chunk >= tensor.num_chunks) return;
  if (static_cast<unsigned>(first >> 32) >= kInfinity) atomicExch(step.not_finite, 1);
  if (step.chosen) step.chosen[tensor.first_chunk + chunk] = ~static_cast<unsigned>(first);
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_chunks_choose(ChunkStep step) {
  const ChunkTensor& tensor =
      step.tensors[LastUpTo(step.tensors, step.num_tensors, &ChunkTensor::first_piece,
                            static_cast<long long>(blockIdx.x))];
  const long long piece = blockIdx.x - tensor.first_piece;
  if (tensor.width == 1) {
    ChooseInPiece<1>(step, tensor, piece);
  } else if (tensor.width == kLanes) {
    ChooseInPiece<kLanes>(step, tensor, piece);
  } else {
    ChooseInPiece<kThreads>(step, tensor, piece);
  }
}

__device__ inline long long OwnNumber() {
  return static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_chunks_pack(ChunkStep step) {
  const long long word = OwnNumber();
  if (word >= step.num_words) return;
  const ChunkTensor& tensor =
      step.tensors[LastUpTo(step.tensors, step.num_tensors, &ChunkTensor::first_word, word)];
  const unsigned packed = PackedWord(
      word - tensor.first_word, tensor.bits, tensor.num_chunks,
      [&](long long chunk) { return step.chosen[tensor.first_chunk + chunk]; });
  step.offsets[word] = static_cast<int>(packed);
}

struct ChosenPlace {
  const ChunkTensor* tensor;
  long long element;
};

__device__ inline ChosenPlace FindChosen(const ChunkStep& step, long long number) {
  const ChunkTensor& tensor =
      step.tensors[LastUpTo(step.tensors, step.num_tensors, &ChunkTensor::first_chunk, number)];
  const long long chunk = number - tensor.first_chunk;
  long long element = chunk * tensor.chunk_size;
  if (tensor.bits > 0) {
    element += UnpackedCode(step.offsets + tensor.first_word, chunk, tensor.bits);
  }
  return {&tensor, element};
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_chunks_take(ChunkStep step) {
  const long long chunk = OwnNumber();
  if (chunk >= step.num_chunks) return;
  const ChosenPlace chosen = FindChosen(step, chunk);
  step.values[chunk] = ChunkSum(*chosen.tensor, chosen.element);
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_chunks_keep(ChunkStep step) {
  const long long chunk = OwnNumber();
  if (chunk >= step.num_chunks) return;
  const ChosenPlace chosen = FindChosen(step, chunk);
  float kept = __fmul_rn(step.kept_share, chosen.tensor->residual[chosen.element]);
  if (step.rests) kept = __fadd_rn(kept, __fmul_rn(step.filter, step.rests[chunk]));
  step.values[chunk] = kept;
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_chunks_spread(ChunkStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const ChunkTensor& tensor = step.tensors[slice.tensor];
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    const float value = LoadGradient(tensor.gradient, tensor.gradient_type, i);
    tensor.residual[i] = __fadd_rn(tensor.residual[i], __fmul_rn(step.filter, value));
    if (tensor.output) tensor.output[i] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_chunks_place(ChunkStep step) {
  const long long chunk = OwnNumber();
  if (chunk >= step.num_chunks) return;
  const ChosenPlace chosen = FindChosen(step, chunk);
  chosen.tensor->residual[chosen.element] = step.values[chunk];
  chosen.tensor->output[chosen.element] = step.totals[chunk];
}

}  // namespace gradcomp::gpu
