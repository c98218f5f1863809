#include <algorithm>
#include <limits>
#include <vector>

#include "../kernels/power_sgd.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// What the three ops have in common. Residuals and gradients are the first inputs, then there may
// be factors; those of the op itself follow, and the ranks are the last.
class PowerSgdOp : public OpKernel {
 public:
  PowerSgdOp(OpKernelConstruction* context, bool has_factors, int num_own_inputs)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    own_inputs_ = (has_factors ? 3 : 2) * num_tensors_;
    const int num_others = own_inputs_ - 2 * num_tensors_ + num_own_inputs + 1;
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, num_others));
  }

 protected:
  using Ranks = std::vector<int64_t>;

  absl::Status GetRanks(OpKernelContext* context, Ranks* ranks) const {
    TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, "ranks", ranks));
    return ToTensorFlow(CheckRanks(*ranks, num_tensors_));
  }

  absl::Status LockResiduals(OpKernelContext* context, const Ranks& ranks,
                             LockedResiduals* residuals) const {
    TF_RETURN_IF_ERROR(residuals->Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, *residuals, num_tensors_));
    for (int i = 0; i < num_tensors_; ++i) {
      const TensorShape& shape = residuals->shape(i);
      TF_RETURN_IF_ERROR(ToTensorFlow(CheckRank(i, ranks[i], Rows(shape), Columns(shape))));
    }
    return absl::OkStatus();
  }

  // A factor may have more columns than the rank; of a tensor that is sent whole, also none at all.
  absl::Status LockFactors(OpKernelContext* context, const Ranks& ranks,
                           LockedResiduals* factors) const {
    TF_RETURN_IF_ERROR(factors->Lock(context, num_tensors_, 2 * num_tensors_, "factor"));
    for (int i = 0; i < num_tensors_; ++i) {
      const int64_t columns = Columns(context->input(num_tensors_ + i).shape());
      const TensorShape& shape = factors->shape(i);
      if (ranks[i] == 0 && shape == TensorShape({0})) continue;
      if (shape.dims() == 2 && shape.dim_size(0) == columns && shape.dim_size(1) >= ranks[i]) {
        continue;
      }
      return InvalidArgument("factor ", i, " has shape ", shape.DebugString(), "; expected [",
                             columns, ",", ranks[i], "], or more columns",
                             ranks[i] == 0 ? ", or [0]" : "");
    }
    return absl::OkStatus();
  }

  PowerSgd Method(OpKernelContext* context, const Ranks& ranks, const LockedResiduals& residuals,
                  const LockedResiduals* factors) const {
    std::vector<PowerSgdTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      const bool has_factor = factors != nullptr && factors->shape(i).dims() == 2;
      tensors.push_back({residuals.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                         Rows(gradient.shape()), Columns(gradient.shape()), ranks[i],
                         has_factor ? factors->shape(i).dim_size(1) : 0});
    }
    return PowerSgd(tensors, ThreadPool(context));
  }

  // An own input, a vector of `size` elements that errors call `name`.
  absl::Status GetVector(OpKernelContext* context, int own_input, const char* name, int64_t size,
                         const float** values) const {
    const Tensor& tensor = context->input(own_inputs_ + own_input);
    if (tensor.shape() != TensorShape({size})) {
      return InvalidArgument(name, " has shape ", tensor.shape().DebugString(), "; expected [",
                             size, "] for these tensors and ranks");
    }
    *values = tensor.flat<float>().data();
    return absl::OkStatus();
  }

  int num_tensors() const { return num_tensors_; }
  int own_inputs() const { return own_inputs_; }

 private:
  static int64_t Columns(const TensorShape& shape) {
    return shape.dims() == 0 ? 1 : shape.dim_size(shape.dims() - 1);
  }
  static int64_t Rows(const TensorShape& shape) {
    return shape.num_elements() == 0 ? 0 : shape.num_elements() / Columns(shape);
  }

  int num_tensors_;
  int own_inputs_;  // the first of them
};

class PowerSgdLeftOp : public PowerSgdOp {
 public:
  explicit PowerSgdLeftOp(OpKernelConstruction* context) : PowerSgdOp(context, true, 1) {}

  void Compute(OpKernelContext* context) override {
    int64_t step = 0;
    OP_REQUIRES_OK(context, GetScalar(context, own_inputs(), "step", &step));
    Ranks ranks;
    LockedResiduals residuals;
    LockedResiduals factors;
    OP_REQUIRES_OK(context, GetRanks(context, &ranks));
    OP_REQUIRES_OK(context, LockResiduals(context, ranks, &residuals));
    OP_REQUIRES_OK(context, LockFactors(context, ranks, &factors));
    const PowerSgd method = Method(context, ranks, residuals, &factors);
    std::vector<const float*> from;
    for (int i = 0; i < num_tensors(); ++i) from.push_back(factors.data(i));
    Tensor* left;
    Tensor* finite;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({method.left_size()}), &left));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &finite));
    finite->scalar<bool>()() = method.ComputeLeft(from, step, left->flat<float>().data());
  }
};

class PowerSgdRightOp : public PowerSgdOp {
 public:
  explicit PowerSgdRightOp(OpKernelConstruction* context) : PowerSgdOp(context, false, 1) {}

  void Compute(OpKernelContext* context) override {
    Ranks ranks;
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, GetRanks(context, &ranks));
    OP_REQUIRES_OK(context, LockResiduals(context, ranks, &residuals));
    const PowerSgd method = Method(context, ranks, residuals, nullptr);
    const float* sum = nullptr;
    OP_REQUIRES_OK(context, GetVector(context, 0, "left_sum", method.left_size(), &sum));
    Tensor* left_output;
    Tensor* right_output;
    Tensor* finite;
    const TensorShape shape({method.left_size()});
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({own_inputs()}, 0, shape,
                                                              &left_output));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({method.right_size()}),
                                                     &right_output));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({}), &finite));
    float* left = left_output->flat<float>().data();
    float* right = right_output->flat<float>().data();
    if (left != sum) std::copy_n(sum, method.left_size(), left);
    finite->scalar<bool>()() = method.Orthonormalize(left);
    if (!finite->scalar<bool>()()) {
      std::fill_n(right, method.right_size(), 0.0f);
      return;
    }
    method.ComputeRight(left, right);
    method.FlagProducts(right);
  }
};

class PowerSgdReduceOp : public PowerSgdOp {
 public:
  explicit PowerSgdReduceOp(OpKernelConstruction* context) : PowerSgdOp(context, true, 5) {}

  void Compute(OpKernelContext* context) override {
    Ranks ranks;
    LockedResiduals residuals;
    LockedResiduals factors;
    OP_REQUIRES_OK(context, GetRanks(context, &ranks));
    OP_REQUIRES_OK(context, LockResiduals(context, ranks, &residuals));
    OP_REQUIRES_OK(context, LockFactors(context, ranks, &factors));
    OP_REQUIRES_OK(context, residuals.Unshare(context));
    OP_REQUIRES_OK(context, factors.Unshare(context));
    const PowerSgd method = Method(context, ranks, residuals, &factors);
    const float* left = nullptr;
    const float* right = nullptr;
    const float* right_sum = nullptr;
    bool keep = false;
    bool finite = false;
    OP_REQUIRES_OK(context, GetVector(context, 0, "left", method.left_size(), &left));
    OP_REQUIRES_OK(context, GetVector(context, 1, "right", method.right_size(), &right));
    OP_REQUIRES_OK(context,
                   GetVector(context, 2, "right_sum", method.right_size(), &right_sum));
    OP_REQUIRES_OK(context, GetScalar(context, own_inputs() + 3, "keep", &keep));
    OP_REQUIRES_OK(context, GetScalar(context, own_inputs() + 4, "finite", &finite));
    std::vector<float*> reduced;
    std::vector<float*> to;
    for (int i = 0; i < num_tensors(); ++i) {
      const int gradient = num_tensors() + i;
      Tensor* output;
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_output(
                                  {gradient}, i, context->input(gradient).shape(), &output));
      reduced.push_back(output->flat<float>().data());
      to.push_back(factors.data(i));
    }
    Tensor* all_finite;
    OP_REQUIRES_OK(context, context->allocate_output(num_tensors(), TensorShape({}), &all_finite));
    finite = finite && method.CanMultiply(right_sum);
    all_finite->scalar<bool>()() = finite;
    if (finite) {
      method.Reduce(left, right, right_sum, reduced);
      method.StoreFactors(right_sum, to);
      return;
    }
    if (keep) method.Keep(left, right_sum);
    for (int i = 0; i < num_tensors(); ++i) {
      std::fill_n(reduced[i], residuals.shape(i).num_elements(), 0.0f);
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("PowerSgdLeft").Device(DEVICE_CPU), PowerSgdLeftOp);
REGISTER_KERNEL_BUILDER(Name("PowerSgdRight").Device(DEVICE_CPU), PowerSgdRightOp);
REGISTER_KERNEL_BUILDER(Name("PowerSgdReduce").Device(DEVICE_CPU), PowerSgdReduceOp);

}  // namespace
}  // namespace gradcomp
