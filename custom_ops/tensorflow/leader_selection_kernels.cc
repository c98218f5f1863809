#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/leader_selection.h"
#include "op_on_device.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

// The first inputs are residuals, gradients and entries. The op's own inputs follow.
class LeaderInputs {
 public:
  // Variables are locked during the lifetime of this object.
  struct Step {
    LockedResiduals residuals;
    std::unique_ptr<LeaderLayout> layout;
  };

 protected:
  absl::Status ReadAttributes(OpKernelConstruction* context, int num_own_inputs) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    return CheckOneGradientEach(context, num_tensors_, 1 + num_own_inputs);
  }

 public:
  absl::Status Read(OpKernelContext* context, Step* step) const {
    std::vector<int64_t> entries;
    TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_, "entries", &entries));
    TF_RETURN_IF_ERROR(step->residuals.Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->residuals, num_tensors_));
    const std::vector<int64_t> sizes = step->residuals.all_sizes();
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckEntries(sizes, entries)));
    step->layout = std::make_unique<LeaderLayout>(sizes, entries);
    return absl::OkStatus();
  }

 protected:
  std::vector<Source> Sources(OpKernelContext* context, const Step& step) const {
    return SourcesOf(context, step.residuals, num_tensors_);
  }

  // Reads and checks the op's first own input.
  absl::Status GetPlaces(OpKernelContext* context, const Step& step, const int32_t** places) const {
    const Tensor& tensor = own_input(context, 0);
    if (tensor.NumElements() != step.layout->num_place_words()) {
      return InvalidArgument("places has ", tensor.NumElements(), " words; expected ",
                             step.layout->num_place_words(), ", as LeaderSelect makes them");
    }
    *places = tensor.flat<int32_t>().data();
    return ToTensorFlow(CheckPlaces(*step.layout, *places));
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

class LeaderSelectInputs : public LeaderInputs {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    std::string order;
    TF_RETURN_IF_ERROR(context->GetAttr("order", &order));
    order_ = order == "value"   ? EntryOrder::kValue
             : order == "index" ? EntryOrder::kIndex
                                : EntryOrder::kMagnitude;
    return LeaderInputs::ReadAttributes(context, 1);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    bool lead = false;
    TF_RETURN_IF_ERROR(GetFlag(context, 0, "lead", &lead));
    Tensor* output;
    const TensorShape shape({step->layout->num_place_words()});
    TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &output));
    bool* finite;
    TF_RETURN_IF_ERROR(AllocateFlag(context, 1, &finite));
    const std::vector<Source> tensors = Sources(context, *step);
    const ParallelFor threads = ThreadPool(context);
    int32_t* places = output->flat<int32_t>().data();
    if (lead) {
      *finite = ChooseEntries(*step->layout, tensors, order_, threads, places);
    } else {
      std::fill_n(places, shape.num_elements(), 0);
      *finite = AllSumsFinite(*step->layout, tensors, threads);
    }
    return absl::OkStatus();
  }

 private:
  EntryOrder order_;
};

class LeaderTakeInputs : public LeaderInputs {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return LeaderInputs::ReadAttributes(context, 2);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    bool finite = false;
    TF_RETURN_IF_ERROR(GetFlag(context, 1, "finite", &finite));
    const int32_t* places = nullptr;
    TF_RETURN_IF_ERROR(GetPlaces(context, *step, &places));
    Tensor* output;
    const TensorShape shape({step->layout->num_values()});
    TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &output));
    float* values = output->flat<float>().data();
    if (finite) {
      TakeEntries(*step->layout, Sources(context, *step), places, ThreadPool(context), values);
    } else {
      std::fill_n(values, shape.num_elements(), 0.0f);
    }
    return absl::OkStatus();
  }
};

class LeaderApplyInputs : public LeaderInputs {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return LeaderInputs::ReadAttributes(context, 5);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    bool own_finite = false;
    bool finite = false;
    TF_RETURN_IF_ERROR(GetFlag(context, 3, "own_finite", &own_finite));
    TF_RETURN_IF_ERROR(GetFlag(context, 4, "finite", &finite));
    const int32_t* places = nullptr;
    TF_RETURN_IF_ERROR(GetPlaces(context, *step, &places));
    const int64_t count = step->layout->num_values();
    const Tensor& totals = own_input(context, 1);
    const Tensor& rests = own_input(context, 2);
    TF_RETURN_IF_ERROR(CheckSums(totals, rests, count));
    const float* sent = totals.flat<float>().data();
    finite = finite && AllFinite(sent, count);
    LockedResiduals& residuals = step->residuals;
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(AllocateReduced(context, residuals, num_tensors(), &reduced));
    bool* all_finite;
    TF_RETURN_IF_ERROR(AllocateFlag(context, num_tensors(), &all_finite));
    *all_finite = finite;
    TF_RETURN_IF_ERROR(residuals.Unshare(context));
    const std::vector<Source> tensors = Sources(context, *step);
    if (finite) {
      ApplyEntries(*step->layout, tensors, places, sent,
                   {rests.flat<float>().data(), rests.NumElements()}, ThreadPool(context), reduced);
      return absl::OkStatus();
    }
    for (int i = 0; i < num_tensors(); ++i) {
      std::fill_n(reduced[i], residuals.shape(i).num_elements(), 0.0f);
    }
    if (own_finite) KeepEntries(*step->layout, tensors, ThreadPool(context));
    return absl::OkStatus();
  }

 private:
  static absl::Status CheckSums(const Tensor& totals, const Tensor& rests, int64_t count) {
    if (totals.NumElements() != count) {
      return InvalidArgument("totals has ", totals.NumElements(), " elements; expected ", count,
                             ", for the entries and the tensors that are sent whole");
    }
    if (rests.NumElements() > count) {
      return InvalidArgument("rests has ", rests.NumElements(), " elements; expected at most ",
                             count, ", as for the totals");
    }
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("LeaderSelect").Device(DEVICE_CPU), OpOnHost<LeaderSelectInputs>);
REGISTER_KERNEL_BUILDER(Name("LeaderTake").Device(DEVICE_CPU), OpOnHost<LeaderTakeInputs>);
REGISTER_KERNEL_BUILDER(Name("LeaderApply").Device(DEVICE_CPU), OpOnHost<LeaderApplyInputs>);

}  // namespace
}  // namespace gradcomp
