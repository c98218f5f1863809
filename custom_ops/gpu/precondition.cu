// Adam's division on a GPU, with the same bits as kernels/precondition.cc. Both launches have a
// block for each slice of a tensor. The first launch checks whether all values are finite, and the
// second divides.
#include "device.h"
#include "precondition_tables.h"

namespace gradcomp::gpu {

struct Divided {
  float value;
  float square;
};

__device__ inline Divided LoadDivided(const DividedTensor& tensor, long long i) {
  const float value = LoadGradient(tensor.gradient, tensor.gradient_type, i);
  return {value, tensor.squares ? tensor.squares[i] : __fmul_rn(value, value)};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_precondition_check(PreconditionStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const DividedTensor& tensor = step.tensors[slice.tensor];
  bool finite = true;
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    const Divided divided = LoadDivided(tensor, i);
    finite = finite && AreFinite(divided.value, divided.square);
  }
  if (!finite) atomicExch(step.not_finite, 1);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gradcomp_precondition_divide(PreconditionStep step) {
  const Slice slice = FindSlice(step.tensors, step.num_tensors, blockIdx.x);
  const DividedTensor& tensor = step.tensors[slice.tensor];
  const bool finite = *step.not_finite == 0;
  for (long long i = slice.begin + threadIdx.x; i < slice.end; i += kThreads) {
    if (!finite) {
      tensor.preconditioned[i] = __uint_as_float(kQuietNaN);
      continue;
    }
    const Divided divided = LoadDivided(tensor, i);
    const float moment = MovedMoment(tensor.second_moment[i], divided.square, tensor.adam.share);
    tensor.second_moment[i] = moment;
    tensor.preconditioned[i] = Quotient(divided.value, moment, tensor.adam);
  }
}

}  // namespace gradcomp::gpu
