#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/led.h"
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

// Residuals, gradients and entries are the first inputs; those of the op itself follow.
class LedOp : public OpKernel {
 public:
  LedOp(OpKernelConstruction* context, int num_own_inputs) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_tensors_));
    OP_REQUIRES_OK(context, CheckOneGradientEach(context, num_tensors_, 1 + num_own_inputs));
  }

 protected:
  // What an op works on, locked for as long as this lives.
  struct Work {
    LockedResiduals residuals;
    std::unique_ptr<LedLayout> layout;
  };

  absl::Status Begin(OpKernelContext* context, Work* work) const {
    std::vector<int64_t> entries;
    TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_, "entries", &entries));
    TF_RETURN_IF_ERROR(work->residuals.Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, work->residuals, num_tensors_));
    const std::vector<int64_t> sizes = work->residuals.all_sizes();
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckEntries(sizes, entries)));
    work->layout = std::make_unique<LedLayout>(sizes, entries);
    return absl::OkStatus();
  }

  std::vector<Source> Sources(OpKernelContext* context, const Work& work) const {
    return SourcesOf(context, work.residuals, num_tensors_);
  }

  // The first own input, checked.
  absl::Status GetPlaces(OpKernelContext* context, const Work& work, const int32_t** places) const {
    const Tensor& tensor = own_input(context, 0);
    if (tensor.NumElements() != work.layout->num_place_words()) {
      return InvalidArgument("places has ", tensor.NumElements(), " words; expected ",
                             work.layout->num_place_words(), ", as LedSelect makes them");
    }
    *places = tensor.flat<int32_t>().data();
    return ToTensorFlow(CheckPlaces(*work.layout, *places));
  }

  absl::Status GetFlag(OpKernelContext* context, int i, const char* name, bool* flag) const {
    return GetScalar(context, own_index(i), name, flag);
  }

  const Tensor& own_input(OpKernelContext* context, int i) const {
    return context->input(own_index(i));
  }
  int num_tensors() const { return num_tensors_; }

 private:
  int own_index(int i) const { return 2 * num_tensors_ + 1 + i; }

  int num_tensors_;
};

class LedSelectOp : public LedOp {
 public:
  explicit LedSelectOp(OpKernelConstruction* context) : LedOp(context, 1) {
    std::string order;
    OP_REQUIRES_OK(context, context->GetAttr("order", &order));
    order_ = order == "value"   ? LedOrder::kValue
             : order == "index" ? LedOrder::kIndex
                                : LedOrder::kMagnitude;
  }

  void Compute(OpKernelContext* context) override {
    bool lead = false;
    OP_REQUIRES_OK(context, GetFlag(context, 0, "lead", &lead));
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    Tensor* output;
    const TensorShape shape({work.layout->num_place_words()});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &output));
    Tensor* finite;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &finite));
    const std::vector<Source> tensors = Sources(context, work);
    const ParallelFor threads = ThreadPool(context);
    int32_t* places = output->flat<int32_t>().data();
    if (lead) {
      finite->scalar<bool>()() = ChooseEntries(*work.layout, tensors, order_, threads, places);
    } else {
      std::fill_n(places, shape.num_elements(), 0);
      finite->scalar<bool>()() = AllSumsFinite(*work.layout, tensors, threads);
    }
  }

 private:
  LedOrder order_;
};

class LedTakeOp : public LedOp {
 public:
  explicit LedTakeOp(OpKernelConstruction* context) : LedOp(context, 2) {}

  void Compute(OpKernelContext* context) override {
    bool finite = false;
    OP_REQUIRES_OK(context, GetFlag(context, 1, "finite", &finite));
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    const int32_t* places = nullptr;
    OP_REQUIRES_OK(context, GetPlaces(context, work, &places));
    Tensor* output;
    const TensorShape shape({work.layout->num_values()});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &output));
    float* values = output->flat<float>().data();
    if (!finite) {
      std::fill_n(values, shape.num_elements(), 0.0f);
      return;
    }
    TakeEntries(*work.layout, Sources(context, work), places, ThreadPool(context), values);
  }
};

class LedApplyOp : public LedOp {
 public:
  explicit LedApplyOp(OpKernelConstruction* context) : LedOp(context, 5) {}

  void Compute(OpKernelContext* context) override {
    bool own_finite = false;
    bool finite = false;
    OP_REQUIRES_OK(context, GetFlag(context, 3, "own_finite", &own_finite));
    OP_REQUIRES_OK(context, GetFlag(context, 4, "finite", &finite));
    Work work;
    OP_REQUIRES_OK(context, Begin(context, &work));
    const int32_t* places = nullptr;
    OP_REQUIRES_OK(context, GetPlaces(context, work, &places));
    const int64_t count = work.layout->num_values();
    const Tensor& totals = own_input(context, 1);
    const Tensor& rests = own_input(context, 2);
    OP_REQUIRES(context, totals.NumElements() == count,
                InvalidArgument("totals has ", totals.NumElements(), " elements; expected ", count,
                                ", those of the entries and of tensors that are sent whole"));
    OP_REQUIRES(context, rests.NumElements() <= count,
                InvalidArgument("rests has ", rests.NumElements(), " elements; expected at most ",
                                count, ", those of the totals"));
    const float* sent = totals.flat<float>().data();
    finite = finite && AllFinite(sent, count);
    std::vector<float*> outputs(num_tensors());
    for (int i = 0; i < num_tensors(); ++i) {
      Tensor* output;
      OP_REQUIRES_OK(context, context->allocate_output(i, work.residuals.shape(i), &output));
      outputs[i] = output->flat<float>().data();
    }
    Tensor* all_finite;
    OP_REQUIRES_OK(context,
                   context->allocate_output(num_tensors(), TensorShape({}), &all_finite));
    all_finite->scalar<bool>()() = finite;
    OP_REQUIRES_OK(context, work.residuals.Unshare(context));
    const std::vector<Source> tensors = Sources(context, work);
    if (finite) {
      ApplyEntries(*work.layout, tensors, places, sent,
                   {rests.flat<float>().data(), rests.NumElements()}, ThreadPool(context),
                   outputs);
      return;
    }
    for (int i = 0; i < num_tensors(); ++i) {
      std::fill_n(outputs[i], work.residuals.shape(i).num_elements(), 0.0f);
    }
    if (own_finite) KeepEntries(*work.layout, tensors, ThreadPool(context));
  }
};

REGISTER_KERNEL_BUILDER(Name("LedSelect").Device(DEVICE_CPU), LedSelectOp);
REGISTER_KERNEL_BUILDER(Name("LedTake").Device(DEVICE_CPU), LedTakeOp);
REGISTER_KERNEL_BUILDER(Name("LedApply").Device(DEVICE_CPU), LedApplyOp);

}  // namespace
}  // namespace gradcomp
