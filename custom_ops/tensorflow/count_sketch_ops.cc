// The ops of CountSketch. tf_gradcomp/ops/sparsification.py documents the ops.
#include <cstdint>
#include <limits>

#include "../kernels/count_sketch.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

constexpr int64_t kMostEntries = std::numeric_limits<int32_t>::max();

// The base of both ops, whose inputs are a vector and the step.
class SketchOpBase : public OpKernel {
 public:
  explicit SketchOpBase(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("columns", &settings_.columns));
    OP_REQUIRES_OK(context, ToTensorFlow(CheckSketch(settings_)));
  }

 protected:
  absl::Status Read(OpKernelContext* context, SketchSettings* settings) const {
    *settings = settings_;
    return GetScalar(context, 1, "step", &settings->step);
  }

  int64_t num_sums() const { return kSketchRows * settings_.columns; }

 private:
  SketchSettings settings_;
};

class CountSketchOp : public SketchOpBase {
 public:
  using SketchOpBase::SketchOpBase;

  void Compute(OpKernelContext* context) override {
    SketchSettings settings;
    OP_REQUIRES_OK(context, Read(context, &settings));
    const Tensor& values = context->input(0);
    Tensor* sums;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({num_sums()}), &sums));
    Sketch(settings, values.flat<float>().data(), values.NumElements(), ThreadPool(context),
           sums->flat<float>().data());
  }
};

class CountSketchLargestOp : public SketchOpBase {
 public:
  explicit CountSketchLargestOp(OpKernelConstruction* context) : SketchOpBase(context) {
    OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
    OP_REQUIRES(context, size_ >= 1 && size_ <= kMostEntries,
                InvalidArgument("size is ", size_, "; expected 1 to ", kMostEntries));
    OP_REQUIRES(context, count_ >= 1 && count_ <= size_,
                InvalidArgument("count is ", count_, "; expected 1 to ", size_, ", the size"));
  }

  void Compute(OpKernelContext* context) override {
    SketchSettings settings;
    OP_REQUIRES_OK(context, Read(context, &settings));
    const Tensor& sums = context->input(0);
    OP_REQUIRES(context, sums.NumElements() == num_sums(),
                InvalidArgument("the sketch has ", sums.NumElements(), " sums; expected ",
                                num_sums(), ", columns of all rows"));
    Tensor estimates;
    OP_REQUIRES_OK(context,
                   context->allocate_temp(tensorflow::DT_FLOAT, TensorShape({size_}), &estimates));
    Tensor* places;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count_}), &places));
    LargestOfSketch(settings, sums.flat<float>().data(), size_, count_, ThreadPool(context),
                    estimates.flat<float>().data(), places->flat<int32_t>().data());
  }

 private:
  int64_t size_;
  int64_t count_;
};

absl::Status SketchShape(InferenceContext* c) {
  int64_t columns;
  TF_RETURN_IF_ERROR(c->GetAttr("columns", &columns));
  c->set_output(0, c->Vector(kSketchRows * columns));
  return absl::OkStatus();
}

absl::Status LargestShape(InferenceContext* c) {
  int64_t count;
  TF_RETURN_IF_ERROR(c->GetAttr("count", &count));
  c->set_output(0, c->Vector(count));
  return absl::OkStatus();
}

REGISTER_OP("CountSketch")
    .Input("values: float")
    .Input("step: int64")
    .Output("sums: float")
    .Attr("columns: int >= 1")
    .SetShapeFn(SketchShape);

REGISTER_OP("CountSketchLargest")
    .Input("sums: float")
    .Input("step: int64")
    .Output("places: int32")
    .Attr("columns: int >= 1")
    .Attr("size: int >= 1")
    .Attr("count: int >= 1")
    .SetShapeFn(LargestShape);

REGISTER_KERNEL_BUILDER(Name("CountSketch").Device(DEVICE_CPU), CountSketchOp);
REGISTER_KERNEL_BUILDER(Name("CountSketchLargest").Device(DEVICE_CPU), CountSketchLargestOp);
// On a GPU, TensorFlow copies the vectors to the host and back.
REGISTER_KERNEL_BUILDER(Name("CountSketch")
                            .Device(DEVICE_GPU)
                            .HostMemory("values")
                            .HostMemory("step")
                            .HostMemory("sums"),
                        CountSketchOp);
REGISTER_KERNEL_BUILDER(Name("CountSketchLargest")
                            .Device(DEVICE_GPU)
                            .HostMemory("sums")
                            .HostMemory("step")
                            .HostMemory("places"),
                        CountSketchLargestOp);

}  // namespace
}  // namespace gradcomp
