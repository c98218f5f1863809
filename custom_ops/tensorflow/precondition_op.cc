// The op of Adam's preconditioning of local gradients. tf_gradcomp/ops/precondition.py documents
// the op.
#include <vector>

#include "../gpu/precondition_on_gpu.h"
#include "../kernels/precondition.h"
#include "adam_support.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

class PreconditionWork {
 public:
  struct Step {
    std::vector<AdamSettings> adam; // for each gradient
    LockedResiduals moments;
    std::vector<const float*> squares;  // for each gradient, on the op's device
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    TF_RETURN_IF_ERROR(adam_.Read(context));
    TF_RETURN_IF_ERROR(squares_.Read(context, num_tensors_));
    return CheckOneGradientEach(context, num_tensors_, 1 + squares_.size());
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(adam_.At(context, 2 * num_tensors_, "step", num_tensors_, &step->adam));
    TF_RETURN_IF_ERROR(step->moments.Lock(context, num_tensors_, 0, "second moment"));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->moments, num_tensors_));
    step->squares.resize(num_tensors_);
    for (int i = 0; i < num_tensors_; ++i) {
      TF_RETURN_IF_ERROR(squares_.At(context, first_squares(), i,
                                     context->input(num_tensors_ + i).shape(),
                                     &step->squares[i]));
    }
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(host.Sources(&step->moments, num_tensors_, /*writes=*/true, &sources));
    std::vector<PreconditionTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const float* squares = nullptr;
      if (step->squares[i]) {
        const Tensor* given;
        TF_RETURN_IF_ERROR(host.Input(first_squares() + i, &given));
        squares = given->flat<float>().data();
      }
      const TensorShape& shape = step->moments.shape(i);
      float* output;
      TF_RETURN_IF_ERROR(host.Output(i, shape, &output));
      tensors.push_back({sources[i].residual, sources[i].gradient, sources[i].type,
                         shape.num_elements(), output, squares, step->adam[i]});
    }
    Precondition(tensors, ThreadPool(context));
    return host.Finish();
  }

  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->moments));
    std::vector<float*> outputs;
    TF_RETURN_IF_ERROR(AllocateReduced(context, step->moments, num_tensors_, &outputs));
    const std::vector<Source> sources = SourcesOf(context, step->moments, num_tensors_);
    std::vector<PreconditionTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      tensors.push_back({sources[i].residual, sources[i].gradient, sources[i].type,
                         step->moments.shape(i).num_elements(), outputs[i], step->squares[i],
                         step->adam[i]});
    }
    PreconditionOnGpu(tensors, queue);
    return absl::OkStatus();
  }

 private:
  int first_squares() const { return 2 * num_tensors_ + 1; }  // input

  int num_tensors_;
  AdamAttributes adam_;
  SquaresInputs squares_;
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

REGISTER_KERNEL_BUILDER(Name("Precondition").Device(DEVICE_CPU),
                        OpOnHost<PreconditionWork>);
REGISTER_KERNEL_BUILDER(
    Name("Precondition").Device(DEVICE_GPU).HostMemory("second_moments").HostMemory("step"),
    OpOnGpu<PreconditionWork>);

}  // namespace
}  // namespace gradcomp
