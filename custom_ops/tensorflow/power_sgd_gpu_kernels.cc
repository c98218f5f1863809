// PowerSGD's ops on GPUs. What crosses to the host and back is factors, for all that replicas make of their
// sums is made there. Where the kernels can't be used, an op does its work on the host.
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../gpu/power_sgd_on_gpu.h"
#include "gpu_support.h"
#include "power_sgd_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;

class PowerSgdLeftGpuOp : public AsyncOpKernel {
 public:
  explicit PowerSgdLeftGpuOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    PowerSgdLeftInputs::Step step;
    OP_REQUIRES_OK_ASYNC(context, inputs_.Read(context, &step), done);
    LockedResiduals& variables = step.work.variables;
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK_ASYNC(context, inputs_.OnHost(context, &step), done);
      variables.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    Waiting waiting = {step.step, step.left, step.finite, inputs_.Tensors(context, step.work)};
    for (int i = 0; i < variables.size(); ++i) waiting.values.push_back(*variables.tensor(i));
    for (int i = inputs_.num_tensors(); i < variables.size(); ++i) {
      const int64_t bytes = 4 * variables.shape(i).num_elements();
      auto* factor = static_cast<float*>(queue->AllocateOnHost(bytes));
      queue->CopyToHost(variables.data(i), bytes, factor);
      waiting.factors.push_back(factor);
    }
    variables.Unlock();
    auto* with = queue.get();
    const bool goes_on = with->Then([context, done, with, waiting = std::move(waiting)]() mutable {
      Multiply(context, done, with, &waiting);
    });
    if (goes_on) return;
    context->SetStatus(queue->KeepUntilDone());
    done();
  }

 private:
  // Until the factors are on the host.
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
    auto* not_finite = static_cast<int*>(queue->AllocateOnHost(sizeof(int)));
    const LeftOnGpu found = ComputeLeftOnGpu(
        waiting->tensors, method.Start(waiting->factors, waiting->step), queue);
    if (found.not_finite) {
      queue->CopyToHost(found.left, 4 * (method.left_size() - 1), waiting->left + 1);
      queue->CopyToHost(found.not_finite, sizeof(int), not_finite);
    } else if (not_finite) {
      *not_finite = 0;
    }
    waiting->values.clear();  // so that the ops behind need not copy them
    queue->Finish(done, [not_finite, left = waiting->left, finite = waiting->finite] {
      *finite = *not_finite == 0;
      left[0] = *finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    });
  }

  PowerSgdLeftInputs inputs_;
};

class PowerSgdRightGpuOp : public AsyncOpKernel {
 public:
  explicit PowerSgdRightGpuOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    PowerSgdRightInputs::Step step;
    OP_REQUIRES_OK_ASYNC(context, inputs_.Read(context, &step), done);
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels || !step.finite) {
      OP_REQUIRES_OK_ASYNC(context, inputs_.OnHost(context, &step), done);
      step.work.variables.Unlock();
      return done();
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    const std::vector<PowerSgdTensor> tensors = inputs_.Tensors(context, step.work);
    auto method = std::make_shared<PowerSgd>(tensors, ThreadPool(context));
    const float* right = ComputeRightOnGpu(tensors, step.left, queue.get());
    queue->CopyToHost(right, 4 * method->right_size(), step.right);
    step.work.variables.Unlock();
    queue->Finish(done, [method, right = step.right] { method->FlagProducts(right); });
  }

 private:
  PowerSgdRightInputs inputs_;
};

class PowerSgdReduceGpuOp : public OpKernel {
 public:
  explicit PowerSgdReduceGpuOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    PowerSgdReduceInputs::Step step;
    OP_REQUIRES_OK(context, inputs_.Read(context, &step));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, inputs_.OnHost(context, &step));
      return;
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    OP_REQUIRES_OK(context, Give(context, &step, queue.get()));
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }

 private:
  absl::Status Give(OpKernelContext* context, PowerSgdReduceInputs::Step* step,
                    TensorFlowQueue* queue) const {
    LockedResiduals& variables = step->work.variables;
    OpOutputList reduced;
    TF_RETURN_IF_ERROR(context->output_list("reduced", &reduced));
    std::vector<float*> outputs;
    for (int i = 0; i < inputs_.num_tensors(); ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(reduced.allocate(i, variables.shape(i), &output));
      outputs.push_back(output->flat<float>().data());
    }
    TF_RETURN_IF_ERROR(queue->Unshare(&variables));
    const std::vector<PowerSgdTensor> tensors = inputs_.Tensors(context, step->work);
    const PowerSgd method(tensors, ThreadPool(context));
    if (step->finite) {
      ReduceOnGpu(tensors, step->left, step->right, step->right_sum, outputs, queue);
      StoreFactors(method, step->right_sum, variables, queue);
      return absl::OkStatus();
    }
    for (int i = 0; i < inputs_.num_tensors(); ++i) {
      queue->Zero(outputs[i], 4 * variables.shape(i).num_elements());
    }
    if (step->keep) KeepOnGpu(tensors, method.TooLarge(step->left, step->right_sum), queue);
    return absl::OkStatus();
  }

  void StoreFactors(const PowerSgd& method, const float* right_sum,
                    const LockedResiduals& variables, TensorFlowQueue* queue) const {
    std::vector<std::vector<float>> factors;
    std::vector<float*> data;
    for (int i = inputs_.num_tensors(); i < variables.size(); ++i) {
      factors.emplace_back(variables.shape(i).num_elements());
    }
    for (std::vector<float>& factor : factors) data.push_back(factor.data());
    method.StoreFactors(right_sum, data);
    for (size_t i = 0; i < factors.size(); ++i) {
      queue->CopyOnGpu(CopyToGpu(queue, factors[i]), 4 * factors[i].size(),
                       variables.data(inputs_.num_tensors() + i));
    }
  }

  PowerSgdReduceInputs inputs_;
};

#define ON_GPU(name) Name(name).Device(DEVICE_GPU).HostMemory("residuals").HostMemory("ranks")

REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdLeft")
                            .HostMemory("factors")
                            .HostMemory("step")
                            .HostMemory("left")
                            .HostMemory("finite"),
                        PowerSgdLeftGpuOp);
REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdRight")
                            .HostMemory("left_sum")
                            .HostMemory("left")
                            .HostMemory("right")
                            .HostMemory("finite"),
                        PowerSgdRightGpuOp);
REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdReduce")
                            .HostMemory("factors")
                            .HostMemory("left")
                            .HostMemory("right")
                            .HostMemory("right_sum")
                            .HostMemory("keep")
                            .HostMemory("finite")
                            .HostMemory("all_finite"),
                        PowerSgdReduceGpuOp);

#undef ON_GPU

}  // namespace
}  // namespace gradcomp
