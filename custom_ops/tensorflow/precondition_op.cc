// Adam's preconditioning of local gradients. What it computes: tf_gradcomp/ops/precondition.py.
#include <memory>
#include <vector>

#include "../gpu/precondition_on_gpu.h"
#include "../kernels/precondition.h"
#include "adam_support.h"
#include "gpu_support.h"
#include "host_tensors.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::shape_inference::InferenceContext;

class PreconditionOp : public OpKernel {
 public:
  explicit PreconditionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, adam_.Read(context));
    OP_REQUIRES_OK(context, squares_.Read(context, num_tensors_));
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, 1 + squares_.size()));
  }

  void Compute(OpKernelContext* context) override {
    Step step;
    OP_REQUIRES_OK(context, Read(context, &step));
    OP_REQUIRES_OK(context, ComputeOnHost(context, &step));
  }

 protected:
  struct Step {
    std::vector<AdamSettings> adam;  // of each gradient
    LockedResiduals moments;
    std::vector<const float*> squares;  // of each gradient, on the op's device
  };

  // Reads and checks everything but the values of tensors.
  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(adam_.At(context, 2 * num_tensors_, "step", num_tensors_, &step->adam));
    TF_RETURN_IF_ERROR(step->moments.Lock(context, num_tensors_, 0, "second moment"));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->moments, num_tensors_));
    step->squares.resize(num_tensors_);
    for (int i = 0; i < num_tensors_; ++i) {
      TF_RETURN_IF_ERROR(squares_.At(context, first_squares(), i, gradient(context, i).shape(),
                                     &step->squares[i]));
    }
    return absl::OkStatus();
  }

  absl::Status ComputeOnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<float*> moments;
    TF_RETURN_IF_ERROR(host.Variables(&step->moments, /*writes=*/true, &moments));
    std::vector<PreconditionTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor* gradient;
      TF_RETURN_IF_ERROR(host.Input(num_tensors_ + i, &gradient));
      const float* squares = nullptr;
      if (step->squares[i]) {
        const Tensor* given;
        TF_RETURN_IF_ERROR(host.Input(first_squares() + i, &given));
        squares = given->flat<float>().data();
      }
      float* output;
      TF_RETURN_IF_ERROR(host.Output(i, gradient->shape(), &output));
      tensors.push_back({moments[i], gradient->data(), ToGradientType(gradient->dtype()),
                         gradient->NumElements(), output, squares, step->adam[i]});
    }
    Precondition(tensors, ThreadPool(context));
    return host.Finish();
  }

  const Tensor& gradient(OpKernelContext* context, int i) const {
    return context->input(num_tensors_ + i);
  }
  int first_squares() const { return 2 * num_tensors_ + 1; }  // input

  int num_tensors_;

 private:
  AdamAttributes adam_;
  SquaresInputs squares_;
};

class PreconditionGpuOp : public PreconditionOp {
 public:
  using PreconditionOp::PreconditionOp;

  void Compute(OpKernelContext* context) override {
    Step step;
    OP_REQUIRES_OK(context, Read(context, &step));
    const KernelsOnGpu* kernels = UsableKernels(context);
    if (!kernels) {
      OP_REQUIRES_OK(context, ComputeOnHost(context, &step));
      return;
    }
    const CurrentContext current(*kernels->driver, kernels->context);
    auto queue = std::make_shared<TensorFlowQueue>(*kernels, context);
    std::vector<PreconditionTensor> tensors;
    OP_REQUIRES_OK(context, queue->Unshare(&step.moments));
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& from = gradient(context, i);
      Tensor* output;
      OP_REQUIRES_OK(context, context->allocate_output(i, from.shape(), &output));
      tensors.push_back({step.moments.data(i), from.data(), ToGradientType(from.dtype()),
                         from.NumElements(), output->flat<float>().data(), step.squares[i],
                         step.adam[i]});
    }
    PreconditionOnGpu(tensors, queue.get());
    OP_REQUIRES_OK(context, queue->KeepUntilDone());
  }
};

absl::Status PreconditionShape(InferenceContext* c) {
  const int num_tensors = c->num_outputs();
  for (int i = 0; i < num_tensors; ++i) c->set_output(i, c->input(num_tensors + i));
  return absl::OkStatus();
}

REGISTER_OP("Precondition")
    .Input("second_moments: N * resource")
    .Input("gradients: Tgradients")
    .Input("step: int64")
    .Input("squares: S * float")
    .Output("preconditioned: N * float")
    .Attr("N: int >= 1")
    .Attr("S: int >= 0")
    .Attr("Tgradients: list({float, half, bfloat16}) >= 1")
    .Attr("beta_2: float")
    .Attr("epsilon: float")
    .Attr("corrects_epsilon: bool")
    .Attr("scale: float")
    .SetIsStateful()
    .SetShapeFn(PreconditionShape);

REGISTER_KERNEL_BUILDER(Name("Precondition").Device(DEVICE_CPU), PreconditionOp);
REGISTER_KERNEL_BUILDER(
    Name("Precondition").Device(DEVICE_GPU).HostMemory("second_moments").HostMemory("step"),
    PreconditionGpuOp);

}  // namespace
}  // namespace gradcomp
