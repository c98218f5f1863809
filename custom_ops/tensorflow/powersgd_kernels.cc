#include <algorithm>
#include <limits>
#include <vector>

#include "../kernels/powersgd.h"
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

// What the three ops have in common. Their inputs begin with N residuals and N gradients.
class PowerSgdOp : public OpKernel {
 public:
  explicit PowerSgdOp(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<tensorflow::DataType> types;
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, context->GetAttr("Tgradients", &types));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    const int num_gradients = types.size();
    OP_REQUIRES(context, num_gradients == num_tensors_,
                InvalidArgument(num_gradients, " gradients for ", num_tensors_,
                                " residuals; expected one gradient for each residual"));
    OP_REQUIRES(context, static_cast<int>(ranks_.size()) == num_tensors_,
                InvalidArgument("ranks has ", ranks_.size(), " entries; expected ", num_tensors_,
                                ": give one rank for each tensor"));
  }

 protected:
  absl::Status LockResiduals(OpKernelContext* context, LockedResiduals* residuals) const {
    TF_RETURN_IF_ERROR(residuals->Lock(context, num_tensors_));
    for (int i = 0; i < num_tensors_; ++i) {
      const TensorShape& shape = context->input(num_tensors_ + i).shape();
      if (shape != residuals->shape(i)) {
        return InvalidArgument("gradient ", i, " has shape ", shape.DebugString(), "; expected ",
                               residuals->shape(i).DebugString(), ", that of its residual");
      }
      const int64_t largest = std::min(Rows(shape), Columns(shape));
      if (ranks_[i] < 0 || ranks_[i] > largest) {
        return InvalidArgument("ranks[", i, "] is ", ranks_[i], "; expected 1 to ", largest,
                               ", the smaller dimension of tensor ", i,
                               ", or 0 to send it whole");
      }
    }
    return absl::OkStatus();
  }

  absl::Status LockFactors(OpKernelContext* context, LockedResiduals* factors) const {
    TF_RETURN_IF_ERROR(factors->Lock(context, num_tensors_, 2 * num_tensors_, "factor"));
    for (int i = 0; i < num_tensors_; ++i) {
      const int64_t columns = Columns(context->input(num_tensors_ + i).shape());
      const TensorShape expected =
          ranks_[i] == 0 ? TensorShape({0}) : TensorShape({columns, ranks_[i]});
      if (factors->shape(i) == expected) continue;
      return InvalidArgument("factor ", i, " has shape ", factors->shape(i).DebugString(),
                             "; expected ", expected.DebugString());
    }
    return absl::OkStatus();
  }

  PowerSgd Method(OpKernelContext* context, const LockedResiduals& residuals) const {
    std::vector<PowerSgdTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      tensors.push_back({residuals.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                         Rows(gradient.shape()), Columns(gradient.shape()), ranks_[i]});
    }
    return PowerSgd(tensors, ThreadPool(context));
  }

  // The input, a vector of `size` elements that errors call `name`.
  absl::Status Vector(OpKernelContext* context, int input, const char* name, int64_t size,
                      const float** values) const {
    const Tensor& tensor = context->input(input);
    if (tensor.shape() != TensorShape({size})) {
      return InvalidArgument(name, " has shape ", tensor.shape().DebugString(), "; expected [",
                             size, "] for these tensors and ranks");
    }
    *values = tensor.flat<float>().data();
    return absl::OkStatus();
  }

  absl::Status Boolean(OpKernelContext* context, int input, const char* name, bool* value) const {
    const Tensor& tensor = context->input(input);
    if (tensor.dims() != 0) {
      return InvalidArgument(name, " has shape ", tensor.shape().DebugString(),
                             "; expected a scalar");
    }
    *value = tensor.scalar<bool>()();
    return absl::OkStatus();
  }

  int num_tensors() const { return num_tensors_; }

 private:
  static int64_t Columns(const TensorShape& shape) {
    return shape.dims() == 0 ? 1 : shape.dim_size(shape.dims() - 1);
  }
  static int64_t Rows(const TensorShape& shape) {
    return shape.num_elements() == 0 ? 0 : shape.num_elements() / Columns(shape);
  }

  int num_tensors_;
  std::vector<int64_t> ranks_;
};

class PowerSgdLeftOp : public PowerSgdOp {
 public:
  using PowerSgdOp::PowerSgdOp;

  void Compute(OpKernelContext* context) override {
    int64_t step = 0;
    OP_REQUIRES_OK(context, GetStep(context, 3 * num_tensors(), &step));
    LockedResiduals residuals;
    LockedResiduals factors;
    OP_REQUIRES_OK(context, LockResiduals(context, &residuals));
    OP_REQUIRES_OK(context, LockFactors(context, &factors));
    const PowerSgd method = Method(context, residuals);
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
  using PowerSgdOp::PowerSgdOp;

  void Compute(OpKernelContext* context) override {
    const int input = 2 * num_tensors();
    LockedResiduals residuals;
    OP_REQUIRES_OK(context, LockResiduals(context, &residuals));
    const PowerSgd method = Method(context, residuals);
    const float* sum = nullptr;
    OP_REQUIRES_OK(context, Vector(context, input, "left_sum", method.left_size(), &sum));
    Tensor* left_output;
    Tensor* right_output;
    Tensor* finite;
    const TensorShape shape({method.left_size()});
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({input}, 0, shape, &left_output));
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
    // All replicas will see it in the sum.
    if (!method.CanMultiply(right)) right[0] = std::numeric_limits<float>::quiet_NaN();
  }
};

class PowerSgdReduceOp : public PowerSgdOp {
 public:
  using PowerSgdOp::PowerSgdOp;

  void Compute(OpKernelContext* context) override {
    const int input = 3 * num_tensors();
    LockedResiduals residuals;
    LockedResiduals factors;
    OP_REQUIRES_OK(context, LockResiduals(context, &residuals));
    OP_REQUIRES_OK(context, LockFactors(context, &factors));
    OP_REQUIRES_OK(context, residuals.Unshare(context));
    OP_REQUIRES_OK(context, factors.Unshare(context));
    const PowerSgd method = Method(context, residuals);
    const float* left = nullptr;
    const float* right = nullptr;
    const float* right_sum = nullptr;
    bool keep = false;
    bool finite = false;
    OP_REQUIRES_OK(context, Vector(context, input, "left", method.left_size(), &left));
    OP_REQUIRES_OK(context, Vector(context, input + 1, "right", method.right_size(), &right));
    OP_REQUIRES_OK(context,
                   Vector(context, input + 2, "right_sum", method.right_size(), &right_sum));
    OP_REQUIRES_OK(context, Boolean(context, input + 3, "keep", &keep));
    OP_REQUIRES_OK(context, Boolean(context, input + 4, "finite", &finite));
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
    if (keep) method.Keep();
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
