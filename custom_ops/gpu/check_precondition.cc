#include <limits>
#include <vector>

#include "../kernels/precondition.h"
#include "check_support.h"
#include "precondition_on_gpu.h"
#include "self_check.h"

namespace gradcomp {
namespace {

const std::vector<int64_t> kPreconditionSizes = {9001, 70, 4096};

// Where there are squares, the first tensor has them.
std::vector<PreconditionTensor> Divided(const std::vector<float*>& moments,
                                        const std::vector<float*>& gradients,
                                        const std::vector<float*>& squares,
                                        const std::vector<float*>& outputs) {
  std::vector<PreconditionTensor> tensors;
  for (size_t i = 0; i < kPreconditionSizes.size(); ++i) {
    tensors.push_back({moments[i], gradients[i], GradientType::kFloat, kPreconditionSizes[i],
                       outputs[i], i == 0 ? squares[i] : nullptr, kAdam});
  }
  return tensors;
}

Tensors Squared(Tensors tensors) {
  for (auto& tensor : tensors) {
    for (float& value : tensor) value *= value;
  }
  return tensors;
}

Status CheckStep(bool finite, DriverQueue* queue) {
  Tensors moments = Squared(NumbersOf(kPreconditionSizes, 11));
  Tensors gradients = NumbersOf(kPreconditionSizes, 12);
  Tensors squares = Squared(NumbersOf(kPreconditionSizes, 13));
  Tensors outputs = NumbersOf(kPreconditionSizes, 14);
  if (!finite) gradients[2][4000] = std::numeric_limits<float>::infinity();
  const std::vector<float*> gpu_moments = Upload(moments, queue);
  const std::vector<float*> gpu_outputs = Upload(outputs, queue);
  PreconditionOnGpu(Divided(gpu_moments, Upload(gradients, queue), Upload(squares, queue),
                            gpu_outputs),
                    queue);
  Precondition(Divided(Pointers(&moments), Pointers(&gradients), Pointers(&squares),
                       Pointers(&outputs)),
               OnThisThread);
  if (!AreEqual(gpu_moments, moments, queue)) return {"second moments are not the CPU's"};
  if (!AreEqual(gpu_outputs, outputs, queue)) return {"divided gradients are not the CPU's"};
  return {};
}

}  // namespace

Status CheckPrecondition(DriverQueue* queue) {
  const Status status = CheckStep(/*finite=*/true, queue);
  return status.ok() ? CheckStep(/*finite=*/false, queue) : status;
}

}  // namespace gradcomp
