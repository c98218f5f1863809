#include <vector>

#include "../kernels/adacomp_steps.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

absl::Status CheckSameShape(const Tensor& a, const Tensor& b, const char* names) {
  if (a.shape() == b.shape()) return absl::OkStatus();
  return InvalidArgument(names, " have shapes ", a.shape().DebugString(), " and ",
                         b.shape().DebugString(), "; expected the same shape for both");
}

class ResidualAccumulateOp : public OpKernel {
 public:
  explicit ResidualAccumulateOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scale_factor", &scale_factor_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& residual = context->input(0);
    const Tensor& gradient = context->input(1);
    OP_REQUIRES_OK(context, CheckSameShape(residual, gradient, "residual and gradient"));
    Tensor* accumulated;
    Tensor* boosted;
    OP_REQUIRES_OK(context, context->allocate_output(0, residual.shape(), &accumulated));
    OP_REQUIRES_OK(context, context->allocate_output(1, residual.shape(), &boosted));
    AccumulateResidual(residual.flat<float>().data(), gradient.data(),
                       ToGradientType(gradient.dtype()), residual.NumElements(), scale_factor_,
                       ThreadPool(context), accumulated->flat<float>().data(),
                       boosted->flat<float>().data());
  }

 private:
  float scale_factor_;
};

class LocalBinSelectOp : public OpKernel {
 public:
  explicit LocalBinSelectOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bin_size", &bin_size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& accumulated = context->input(0);
    const Tensor& boosted = context->input(1);
    OP_REQUIRES_OK(context, CheckSameShape(accumulated, boosted, "accumulated and boosted"));
    const int64_t size = accumulated.NumElements();
    Tensor* bin_max;
    OP_REQUIRES_OK(context,
                   context->allocate_output(1, TensorShape({CeilDiv(size, bin_size_)}), &bin_max));
    const std::vector<int64_t> selected =
        SelectInBins(accumulated.flat<float>().data(), boosted.flat<float>().data(), size,
                     bin_size_, ThreadPool(context), bin_max->flat<float>().data());
    Tensor* positions;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, TensorShape({static_cast<int64_t>(selected.size())}),
                                &positions));
    std::copy(selected.begin(), selected.end(), positions->flat<int64_t>().data());
  }

 private:
  int64_t bin_size_;
};

class TernaryQuantizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& accumulated = context->input(0);
    const Tensor& positions = context->input(1);
    const Tensor& bin_max = context->input(2);
    OP_REQUIRES(context, positions.dims() == 1 && bin_max.dims() == 1,
                InvalidArgument("positions and bin_max have shapes ",
                                positions.shape().DebugString(), " and ",
                                bin_max.shape().DebugString(), "; expected two vectors"));
    const int64_t size = accumulated.NumElements();
    const int64_t* at = positions.flat<int64_t>().data();
    OP_REQUIRES_OK(context, ToTensorFlow(CheckPositions(at, positions.NumElements(), size)));
    Tensor* signs;
    Tensor* scale;
    Tensor* residual;
    OP_REQUIRES_OK(context, context->allocate_output(0, positions.shape(), &signs));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &scale));
    OP_REQUIRES_OK(context, context->allocate_output(2, accumulated.shape(), &residual));
    const float mean = ScaleOf(bin_max.flat<float>().data(), bin_max.NumElements());
    scale->scalar<float>()() = mean;
    QuantizeTernary(accumulated.flat<float>().data(), size, at, positions.NumElements(), mean,
                    ThreadPool(context), signs->flat<int8_t>().data(),
                    residual->flat<float>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("ResidualAccumulate").Device(DEVICE_CPU), ResidualAccumulateOp);
REGISTER_KERNEL_BUILDER(Name("LocalBinSelect").Device(DEVICE_CPU), LocalBinSelectOp);
REGISTER_KERNEL_BUILDER(Name("TernaryQuantize").Device(DEVICE_CPU), TernaryQuantizeOp);

}  // namespace
}  // namespace gradcomp
