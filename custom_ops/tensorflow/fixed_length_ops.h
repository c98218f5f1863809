// The ops of methods whose payloads have a fixed length: <Method>Encode, <Method>Decode and
// <Method>PutBack. A method registers them by macros and has a class of settings:
//
//   struct Settings {
//     static constexpr Method kMethod;
//     static constexpr bool kDependsOnReplica;  // then Encode has an input `replica`, its number
//     static constexpr const char* kMain;  // the last input, a setting of each tensor; null: none
//     static Status Check(const std::vector<int64_t>& main, int64_t num_tensors);
//     absl::Status Read(OpKernelConstruction* context);  // attributes
//     std::unique_ptr<const Codec> NewCodec(int64_t size, int64_t main) const;
//   };
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../kernels/fixed_length.h"
#include "../kernels/payload.h"
#include "host_tensors.h"
#include "op_support.h"
#include "shape_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// The part that all ops of a method share.
template <typename Settings>
class FixedLengthInputs {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    TF_RETURN_IF_ERROR(context->GetAttr("fingerprint", &fingerprint_));
    return settings_.Read(context);
  }

 protected:
  static constexpr int kMainInputs = Settings::kMain == nullptr ? 0 : 1;

  // Reads the main settings, the last input; an empty list for a method without any.
  absl::Status GetMain(OpKernelContext* context, std::vector<int64_t>* main) const {
    if constexpr (kMainInputs == 0) {
      return absl::OkStatus();
    } else {
      TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, Settings::kMain, main));
      return ToTensorFlow(Settings::Check(*main, num_tensors_));
    }
  }

  // `shapes` has .shape(i) of each tensor.
  template <typename Shapes>
  Codecs NewCodecs(const std::vector<int64_t>& main, const Shapes& shapes) const {
    Codecs codecs;
    for (int i = 0; i < num_tensors_; ++i) {
      const int64_t of_tensor = kMainInputs == 0 ? 0 : main[i];
      codecs.push_back(settings_.NewCodec(shapes.shape(i).num_elements(), of_tensor));
    }
    return codecs;
  }

  std::unique_ptr<FixedLengthDecoder> NewDecoder(OpKernelContext* context,
                                                 const Codecs& codecs,
                                                 const std::vector<int64_t>& main) const {
    return std::make_unique<FixedLengthDecoder>(codecs, Settings::kMethod, fingerprint_,
                                                PlanOf(main), ThreadPool(context));
  }

  int num_tensors_;
  int64_t fingerprint_;

 private:
  Settings settings_;
};

template <typename Settings>
class FixedLengthEncodeInputs : public FixedLengthInputs<Settings> {
  using Base = FixedLengthInputs<Settings>;

 public:
  struct Step {
    Sender sender;
    LockedResiduals residuals;
    Codecs codecs;
    int32_t* payload;  // the output
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(Base::ReadAttributes(context));
    constexpr int kOwnInputs = (Settings::kDependsOnReplica ? 2 : 1) + Base::kMainInputs;
    return CheckOneGradientEach(context, num_tensors_, kOwnInputs);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    std::vector<int64_t> main;
    TF_RETURN_IF_ERROR(this->GetMain(context, &main));
    step->sender = {Settings::kMethod, this->fingerprint_, PlanOf(main), 0, 0};
    TF_RETURN_IF_ERROR(GetScalar(context, 2 * num_tensors_, "step", &step->sender.step));
    if constexpr (Settings::kDependsOnReplica) {
      TF_RETURN_IF_ERROR(
          GetScalar(context, 2 * num_tensors_ + 1, "replica", &step->sender.replica));
    }
    TF_RETURN_IF_ERROR(step->residuals.Lock(context, num_tensors_));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->residuals, num_tensors_));
    step->codecs = this->NewCodecs(main, step->residuals);
    Tensor* payload;
    Tensor* tensor_bytes;
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, PayloadWords(step->codecs), &payload));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {num_tensors_}, &tensor_bytes));
    for (int i = 0; i < num_tensors_; ++i) {
      tensor_bytes->flat<int64_t>()(i) = 4 * step->codecs[i]->words();
    }
    step->payload = payload->flat<int32_t>().data();
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(host.Sources(&step->residuals, num_tensors_, /*writes=*/true, &sources));
    EncodeFixedLength(step->codecs, sources, step->sender, ThreadPool(context), step->payload);
    return host.Finish();
  }

 protected:
  using Base::num_tensors_;
};

template <typename Settings>
class FixedLengthDecodeInputs : public FixedLengthInputs<Settings> {
  using Base = FixedLengthInputs<Settings>;

 public:
  struct Step {
    Codecs codecs;
    std::unique_ptr<FixedLengthDecoder> decoder;  // of payloads that are checked
    bool* finite;                                 // the output
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(Base::ReadAttributes(context));
    TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes_));
    if (static_cast<int>(shapes_.size()) == num_tensors_) return absl::OkStatus();
    return InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors_,
                           ": give one shape for each tensor");
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    const Tensor& payloads = context->input(0);
    int64_t expected_step;
    TF_RETURN_IF_ERROR(GetScalar(context, 1, "step", &expected_step));
    TF_RETURN_IF_ERROR(CheckRows(payloads));
    std::vector<int64_t> main;
    TF_RETURN_IF_ERROR(this->GetMain(context, &main));
    step->codecs = this->NewCodecs(main, *this);
    step->decoder = this->NewDecoder(context, step->codecs, main);
    TF_RETURN_IF_ERROR(
        ToTensorFlow(step->decoder->Read(payloads.flat<int32_t>().data(), payloads.dim_size(0),
                                         payloads.dim_size(1), expected_step)));
    Tensor* finite;
    TF_RETURN_IF_ERROR(context->allocate_output(num_tensors_, {}, &finite));
    step->finite = finite->flat<bool>().data();
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<float*> reduced(num_tensors_);
    for (int i = 0; i < num_tensors_; ++i) {
      TF_RETURN_IF_ERROR(host.Output(i, shapes_[i], &reduced[i]));
    }
    *step->finite = step->decoder->Reduce(reduced);
    return host.Finish();
  }

  const TensorShape& shape(int i) const { return shapes_[i]; }

 protected:
  using Base::num_tensors_;

 private:
  std::vector<TensorShape> shapes_;
};

template <typename Settings>
class FixedLengthPutBackInputs : public FixedLengthInputs<Settings> {
 public:
  struct Step {
    LockedResiduals residuals;
    Codecs codecs;
    std::unique_ptr<FixedLengthDecoder> decoder;  // of a payload that is checked
  };

  absl::Status Read(OpKernelContext* context, Step* step) const {
    return ReadFrom(context, /*payload_input=*/this->num_tensors_, step);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<float*> values;
    TF_RETURN_IF_ERROR(host.Variables(&step->residuals, /*writes=*/true, &values));
    step->decoder->AddTo(values);
    return host.Finish();
  }

 protected:
  absl::Status ReadFrom(OpKernelContext* context, int payload_input,
                        Step* step) const {
    const Tensor& payload = context->input(payload_input);
    std::vector<int64_t> main;
    TF_RETURN_IF_ERROR(this->GetMain(context, &main));
    TF_RETURN_IF_ERROR(step->residuals.Lock(context, this->num_tensors_));
    step->codecs = this->NewCodecs(main, step->residuals);
    step->decoder = this->NewDecoder(context, step->codecs, main);
    return ToTensorFlow(step->decoder->Read(payload.flat<int32_t>().data(), 1,
                                            payload.NumElements(), std::nullopt));
  }
};

}  // namespace gradcomp
