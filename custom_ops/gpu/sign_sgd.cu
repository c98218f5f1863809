// SignSGD on a GPU, with the same bits as kernels/sign_sgd_codec.cc, because sums have the same
// order.
//
//   gradcomp_sign_sgd_sum   a block for each block of kSignSgdBlock elements   sums of magnitudes
//   gradcomp_sign_sgd_mean  a block for each tensor   their mean; is all finite?
//   gradcomp_sign_sgd_send  a block for each slice    writes signs; updates the residual
//
// Decoding is one launch, with a block for each slice. The payloads have been checked.
#include "fixed_device.h"
#include "sign_sgd_tables.h"

namespace gradcomp::gpu {

constexpr int kTileElements = 4096;  // elements that a block loads together

// A thread sums each lane of the tile that all threads have loaded, while other blocks load.
extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_sign_sgd_sum(SignSgdEncodeStep step) {
  __shared__ float magnitudes[kTileElements];
  __shared__ double lanes[kSignSgdLanes];
  const long long number = LastUpTo(step.tensors, step.num_tensors, &SignSgdTensor::first_block,
                                    static_cast<long long>(blockIdx.x));
  const SignSgdTensor& tensor = step.tensors[number];
  const long long begin = (blockIdx.x - tensor.first_block) * kSignSgdBlock;
  const long long end = begin + kSignSgdBlock < tensor.size ? begin + kSignSgdBlock : tensor.size;
  double lane = 0;
  for (long long first = begin; first < end; first += kTileElements) {
    const int size = static_cast<int>(end - first < kTileElements ? end - first : kTileElements);
    __syncthreads();  // all threads have read the tile before
    for (int i = threadIdx.x; i < size; i += kThreads) {
      magnitudes[i] = __uint_as_float(Magnitude(FixedSum(tensor, first + i)));
    }
    __syncthreads();
    if (threadIdx.x >= kSignSgdLanes) continue;
    for (int i = threadIdx.x; i < size; i += kSignSgdLanes) lane = __dadd_rn(lane, magnitudes[i]);
  }
  if (threadIdx.x < kSignSgdLanes) lanes[threadIdx.x] = lane;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (int i = 0; i < kSignSgdLanes; ++i) sum = __dadd_rn(sum, lanes[i]);
  step.block_sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_sign_sgd_mean(SignSgdEncodeStep step) {
  __shared__ double sums[kThreads];
  const SignSgdTensor& tensor = step.tensors[blockIdx.x];
  double sum = 0;
  for (long long first = 0; first < tensor.num_blocks; first += kThreads) {
    const long long rest = tensor.num_blocks - first;
    const int count = static_cast<int>(rest < kThreads ? rest : kThreads);
    __syncthreads();  // all threads have read the sums before
    const int own = threadIdx.x;
    if (own < count) sums[own] = step.block_sums[tensor.first_block + first + own];
    __syncthreads();
    if (own != 0) continue;
    for (int i = 0; i < count; ++i) sum = __dadd_rn(sum, sums[i]);
  }
  if (threadIdx.x != 0 || tensor.size == 0) return;
  const float mean = __double2float_rn(__ddiv_rn(sum, static_cast<double>(tensor.size)));
  step.means[blockIdx.x] = mean;
  if (Magnitude(mean) >= kInfinity) atomicExch(step.not_finite, 1);  // a magnitude is not finite
}

__device__ inline float SignedMean(float mean, bool negative) { return negative ? -mean : mean; }

extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_sign_sgd_send(SignSgdEncodeStep step) {
  if (*step.not_finite) return;
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const SignSgdTensor& tensor = step.tensors[slice.tensor];
  const float mean = step.means[slice.tensor];
  int* words = step.body + tensor.first_word;
  if (slice.begin == 0 && threadIdx.x == 0) words[0] = static_cast<int>(__float_as_uint(mean));
  const int lane = threadIdx.x % kLanes;
  // A warp handles the elements of a word.
  for (long long begin = slice.begin + threadIdx.x - lane; begin < slice.end; begin += kThreads) {
    const long long i = begin + lane;
    const bool is_one = i < slice.end;
    const float value = is_one ? FixedSum(tensor, i) : 0.0f;
    const bool negative = value < 0;
    const unsigned signs = __ballot_sync(kAllLanes, negative);
    if (lane == 0) words[1 + begin / kLanes] = static_cast<int>(signs);
    if (is_one) tensor.values[i] = __fsub_rn(value, SignedMean(mean, negative));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_sign_sgd_decode(SignSgdDecodeStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  DecodeElements(step, slice, [](const int* words, long long i) {
    return SignedMean(FloatAt()(words, 0), UnpackedCode(words + 1, i, 1) != 0);
  });
}

}  // namespace gradcomp::gpu
