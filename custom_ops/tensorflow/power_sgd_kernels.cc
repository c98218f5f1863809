// PowerSGD's ops on CPUs and GPUs. Only factors are copied between a GPU and the host, because all
// replicas process the summed factors on the host.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../gpu/power_sgd_on_gpu.h"
#include "../kernels/power_sgd.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "op_support.h"
#include "power_sgd_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

class PowerSgdLeftWork : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    int64_t step = 0;
    float* left = nullptr;  // the outputs
    bool* finite = nullptr;
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return PowerSgdInputs::ReadAttributes(context, FactorInputs::kRight, 1);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(GetScalar(context, own_index(0), "step", &step->step));
    TF_RETURN_IF_ERROR(Begin(context, &step->work));
    const PowerSgd method(Tensors(context, step->work), ThreadPool(context));
    Tensor* left;
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, method.left_size(), &left));
    step->left = left->flat<float>().data();
    return AllocateFlag(context, 1, &step->finite);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<PowerSgdTensor> tensors;
    std::vector<float*> factors;
    TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, /*writes=*/false, &host, &tensors, &factors));
    const PowerSgd method(tensors, ThreadPool(context));
    const std::vector<float> start = method.Start({factors.begin(), factors.end()}, step->step);
    *step->finite = method.ComputeLeft(start, step->left);
    return host.Finish();
  }

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
  // The step, until its factors are on the host.
  struct Waiting {
    int64_t step;
    float* left;
    bool* finite;
    std::vector<PowerSgdTensor> tensors;
    std::vector<const float*> factors;
    std::vector<Tensor> values;  // the current values of all variables, unaffected by later assignments
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
    waiting->values.clear();  // so that later ops need not copy the values
    queue->Finish(done, [not_finite, left = waiting->left, finite = waiting->finite] {
      *finite = *not_finite == 0;
      left[0] = *finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    });
  }
};

class PowerSgdRightWork : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    float* left = nullptr;   // an output; orthonormal if finite
    float* right = nullptr;  // an output; zeros if `left` is not finite
    bool finite = false;
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return PowerSgdInputs::ReadAttributes(context, FactorInputs::kNone, 1);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(Begin(context, &step->work));
    const PowerSgd method(Tensors(context, step->work), ThreadPool(context));
    const float* sum = nullptr;
    TF_RETURN_IF_ERROR(GetVector(context, 0, "left_sum", method.left_size(), &sum));
    Tensor* left;
    Tensor* right;
    bool* finite;
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
        {own_index(0)}, 0, TensorShape({method.left_size()}), &left));
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 1, method.right_size(), &right));
    TF_RETURN_IF_ERROR(AllocateFlag(context, 2, &finite));
    step->left = left->flat<float>().data();
    step->right = right->flat<float>().data();
    if (step->left != sum) std::copy_n(sum, method.left_size(), step->left);
    step->finite = method.Orthonormalize(step->left);
    *finite = step->finite;
    if (!step->finite) std::fill_n(step->right, method.right_size(), 0.0f);
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    if (!step->finite) return absl::OkStatus();
    HostTensors host(context);
    std::vector<PowerSgdTensor> tensors;
    std::vector<float*> factors;
    TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, /*writes=*/false, &host, &tensors, &factors));
    const PowerSgd method(tensors, ThreadPool(context));
    method.ComputeRight(step->left, step->right);
    method.FlagProducts(step->right);
    return host.Finish();
  }

  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    if (!step->finite) {  // the outputs are already written
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

class PowerSgdReduceWork : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    const float* left = nullptr;
    const float* right = nullptr;
    const float* right_sum = nullptr;
    bool keep = false;
    bool finite = false;  // including the products
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return PowerSgdInputs::ReadAttributes(context, FactorInputs::kRight, 5);
  }

  // Also writes the output `all_finite`.
  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(Begin(context, &step->work));
    const PowerSgd method(Tensors(context, step->work), ThreadPool(context));
    const int64_t right_size = method.right_size();
    TF_RETURN_IF_ERROR(GetVector(context, 0, "left", method.left_size(), &step->left));
    TF_RETURN_IF_ERROR(GetVector(context, 1, "right", right_size, &step->right));
    TF_RETURN_IF_ERROR(GetVector(context, 2, "right_sum", right_size, &step->right_sum));
    TF_RETURN_IF_ERROR(GetScalar(context, own_index(3), "keep", &step->keep));
    TF_RETURN_IF_ERROR(GetScalar(context, own_index(4), "finite", &step->finite));
    step->finite = step->finite && method.CanMultiply(step->right_sum);
    bool* all_finite;
    TF_RETURN_IF_ERROR(AllocateFlag(context, num_tensors(), &all_finite));
    *all_finite = step->finite;
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<PowerSgdTensor> tensors;
    std::vector<float*> factors;
    TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, /*writes=*/true, &host, &tensors, &factors));
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(ReducedOnHost(step->work, &host, &reduced));
    const PowerSgd method(tensors, ThreadPool(context));
    if (step->finite) {
      method.Reduce({step->left, step->right}, {step->left, step->right_sum}, reduced);
      method.StoreFactors(step->right_sum, factors);
      return host.Finish();
    }
    if (step->keep) method.Keep(method.TooLarge(step->left, step->right_sum));
    FillWithZeros(step->work, reduced);
    return host.Finish();
  }

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
                        AsyncOpOnGpu<PowerSgdLeftWork>);
REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdRight")
                            .HostMemory("left_sum")
                            .HostMemory("left")
                            .HostMemory("right")
                            .HostMemory("finite"),
                        AsyncOpOnGpu<PowerSgdRightWork>);
REGISTER_KERNEL_BUILDER(ON_GPU("PowerSgdReduce")
                            .HostMemory("factors")
                            .HostMemory("left")
                            .HostMemory("right")
                            .HostMemory("right_sum")
                            .HostMemory("keep")
                            .HostMemory("finite")
                            .HostMemory("all_finite"),
                        OpOnGpu<PowerSgdReduceWork>);

#undef ON_GPU

REGISTER_KERNEL_BUILDER(Name("PowerSgdLeft").Device(DEVICE_CPU), OpOnHost<PowerSgdLeftWork>);
REGISTER_KERNEL_BUILDER(Name("PowerSgdRight").Device(DEVICE_CPU), OpOnHost<PowerSgdRightWork>);
REGISTER_KERNEL_BUILDER(Name("PowerSgdReduce").Device(DEVICE_CPU), OpOnHost<PowerSgdReduceWork>);

}  // namespace
}  // namespace gradcomp
