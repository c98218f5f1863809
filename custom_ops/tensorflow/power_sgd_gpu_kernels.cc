// PowerSGD's ops on GPUs. What crosses to the host and back is factors, for all that replicas make of their
// sums is made there. Where the kernels can't be used, an op does its work on the host.
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../gpu/power_sgd_on_gpu.h"
#include "op_on_gpu.h"
#include "power_sgd_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

class PowerSgdLeftOnGpu : public PowerSgdLeftInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    LockedResiduals& variables = step->work.variables;
    Waiting waiting = {step->step, step->left, step->finite, Tensors(context, step->work)};
    for (int i = 0; i < variables.size(); ++i) waiting.values.push_back(*variables.tensor(i));
    for (int i = num_tensors(); i < variables.size(); ++i) {
      const int64_t bytes = 4 * variables.shape(i).num_elements();
      auto* factor = static_cast<float*>(queue->AllocateOnHost(bytes));
      queue->CopyToHost(variables.data(i), bytes, factor);
      waiting.factors.push_back(factor);
    }
    variables.Unlock();
    queue->Continue(done, [context, done, queue, waiting = std::move(waiting)]() mutable {
      Multiply(context, done, queue, &waiting);
    });
    return absl::OkStatus();
  }

 private:
  // The step until its factors are on the host.
  struct Waiting {
    int64_t step;
    float* left;
    bool* finite;
    std::vector<PowerSgdTensor> tensors;
    std::vector<const float*> factors;
    std::vector<Tensor> values;  // of all variables as they are, whatever is assigned meanwhile
  };

  static void Multiply(OpKernelContext* context, const DoneCallback& done, TensorFlowQueue* queue,
                       Waiting* waiting) {
    const CurrentContext current(queue->driver(), queue->context());
    const PowerSgd method(waiting->tensors, ThreadPool(context));
    const LeftOnGpu found = ComputeLeftOnGpu(
        waiting->tensors, method.Start(waiting->factors, waiting->step), queue);
    if (found.not_finite) {
      queue->CopyToHost(found.left, 4 * (method.left_size() - 1), waiting->left + 1);
    }
    const int* not_finite = queue->FlagToHost(found.not_finite);
    waiting->values.clear();  // so that the ops behind need not copy them
    queue->Finish(done, [not_finite, left = waiting->left, finite = waiting->finite] {
      *finite = *not_finite == 0;
      left[0] = *finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    });
  }
};

class PowerSgdRightOnGpu : public PowerSgdRightInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    if (!step->finite) {  // then the outputs are written already
      step->work.variables.Unlock();
      done();
      return absl::OkStatus();
    }
    const std::vector<PowerSgdTensor> tensors = Tensors(context, step->work);
    auto method = std::make_shared<PowerSgd>(tensors, ThreadPool(context));
    const float* right = ComputeRightOnGpu(tensors, step->left, queue);
    queue->CopyToHost(right, 4 * method->right_size(), step->right);
    step->work.variables.Unlock();
    queue->Finish(done, [method, right = step->right] { method->FlagProducts(right); });
    return absl::OkStatus();
  }
};

class PowerSgdReduceOnGpu : public PowerSgdReduceInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    LockedResiduals& variables = step->work.variables;
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(AllocateReduced(context, variables, num_tensors(), &reduced));
    TF_RETURN_IF_ERROR(queue->Unshare(&variables));
    const std::vector<PowerSgdTensor> tensors = Tensors(context, step->work);
    const PowerSgd method(tensors, ThreadPool(context));
    if (step->finite) {
      ReduceOnGpu(tensors, step->left, step->right, step->right_sum, reduced, queue);
      StoreFactors(method, step->right_sum, variables, queue);
      return absl::OkStatus();
    }
    for (int i = 0; i < num_tensors(); ++i) {
      queue->Zero(reduced[i], 4 * variables.shape(i).num_elements());
    }
    if (step->keep) KeepOnGpu(tensors, method.TooLarge(step->left, step->right_sum), queue);
    return absl::OkStatus();
  }

 private:
  void StoreFactors(const PowerSgd& method, const float* right_sum,
                    const LockedResiduals& variables, TensorFlowQueue* queue) const {
    std::vector<std::vector<float>> factors;
    std::vector<float*> data;
    for (int i = num_tensors(); i < variables.size(); ++i) {
      factors.emplace_back(variables.shape(i).num_elements());
    }
    for (std::vector<float>& factor : factors) data.push_back(factor.data());
    method.StoreFactors(right_sum, data);
    for (size_t i = 0; i < factors.size(); ++i) {
      queue->CopyOnGpu(CopyToGpu(queue, factors[i]), 4 * factors[i].size(),
                       variables.data(num_tensors() + i));
    }
  }
};

#define ON_GPU(name) Name(name).Device(DEVICE_GPU).HostMemory("residuals").HostMemory("ranks")

REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdLeft")
                            .HostMemory("factors")
                            .HostMemory("step")
                            .HostMemory("left")
                            .HostMemory("finite"),
                        AsyncOpOnGpu<PowerSgdLeftOnGpu>);
REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdRight")
                            .HostMemory("left_sum")
                            .HostMemory("left")
                            .HostMemory("right")
                            .HostMemory("finite"),
                        AsyncOpOnGpu<PowerSgdRightOnGpu>);
REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdReduce")
                            .HostMemory("factors")
                            .HostMemory("left")
                            .HostMemory("right")
                            .HostMemory("right_sum")
                            .HostMemory("keep")
                            .HostMemory("finite")
                            .HostMemory("all_finite"),
                        OpOnGpu<PowerSgdReduceOnGpu>);

#undef ON_GPU

}  // namespace
}  // namespace gradcomp
