// The ops <Method>Decode and <Method>PutBack of methods that gather payloads. Only payloads are
// copied between a GPU and the host. A method has a class of settings:
//
//   struct Settings {
//     using Decoder;                       // such as FixedLengthDecoder
//     static constexpr const char* kMain;  // the last input, a setting of each tensor; null: none
//     static constexpr auto kCheck;        // Status(main settings, number of tensors)
//     static constexpr auto DecodeOnGpu;   // void(codecs, decoder, values, adds, queue)
//     absl::Status Read(OpKernelConstruction* context);  // attributes
//     auto NewCodec(int64_t size, int64_t main) const;   // how a tensor is encoded
//     static std::unique_ptr<Decoder> NewDecoder(codecs, fingerprint, plan, parallel_for);
//   };
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../kernels/adacomp_layout.h"
#include "../kernels/payload.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// The base of all ops of a method.
template <typename Settings>
class PayloadInputs {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    TF_RETURN_IF_ERROR(context->GetAttr("fingerprint", &fingerprint_));
    return settings_.Read(context);
  }

 protected:
  using MethodCodecs = std::vector<decltype(std::declval<Settings>().NewCodec(0, 0))>;
  static constexpr int kMainInputs = Settings::kMain == nullptr ? 0 : 1;

  // Reads the main settings, the last input; an empty list for a method without main settings.
  absl::Status GetMain(OpKernelContext* context, std::vector<int64_t>* main) const {
    if constexpr (kMainInputs == 0) {
      return absl::OkStatus();
    } else {
      TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, Settings::kMain, main));
      return ToTensorFlow(Settings::kCheck(*main, num_tensors_));
    }
  }

  // `shapes` has a method shape(i).
  template <typename Shapes>
  MethodCodecs NewCodecs(const std::vector<int64_t>& main, const Shapes& shapes) const {
    MethodCodecs codecs;
    for (int i = 0; i < num_tensors_; ++i) {
      const int64_t of_tensor = kMainInputs == 0 ? 0 : main[i];
      codecs.push_back(settings_.NewCodec(shapes.shape(i).num_elements(), of_tensor));
    }
    return codecs;
  }

  int num_tensors_;
  int64_t fingerprint_;

 private:
  Settings settings_;
};

template <typename Settings>
struct DecodeStep {
  std::vector<decltype(std::declval<Settings>().NewCodec(0, 0))> codecs;
  std::unique_ptr<typename Settings::Decoder> decoder;  // with checked payloads
  LockedResiduals residuals;                            // for PutBack
  bool* finite = nullptr;                               // the output of Decode
};

template <typename Settings>
class DecodeInputs : public PayloadInputs<Settings> {
  using Base = PayloadInputs<Settings>;

 public:
  using Step = DecodeStep<Settings>;

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(Base::ReadAttributes(context));
    TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes_));
    if (static_cast<int>(shapes_.size()) != num_tensors_) {
      return InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors_,
                             ": give one shape for each tensor");
    }
    for (int i = 0; i < num_tensors_; ++i) {
      TF_RETURN_IF_ERROR(ToTensorFlow(CheckTensorSize(i, shapes_[i].num_elements())));
    }
    return absl::OkStatus();
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    const Tensor& payloads = context->input(0);
    int64_t expected_step;
    TF_RETURN_IF_ERROR(GetScalar(context, 1, "step", &expected_step));
    TF_RETURN_IF_ERROR(CheckRows(payloads));
    std::vector<int64_t> main;
    TF_RETURN_IF_ERROR(this->GetMain(context, &main));
    step->codecs = this->NewCodecs(main, *this);
    step->decoder = Settings::NewDecoder(step->codecs, this->fingerprint_, PlanOf(main),
                                         ThreadPool(context));
    TF_RETURN_IF_ERROR(
        ToTensorFlow(step->decoder->Read(payloads.flat<int32_t>().data(), payloads.dim_size(0),
                                         payloads.dim_size(1), expected_step)));
    return AllocateFlag(context, num_tensors_, &step->finite);
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

  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    *step->finite = step->decoder->finite();
    // If a sum may overflow, the host computes the sums.
    if (*step->finite && !step->decoder->ReducesToFinite()) return OnHost(context, step);
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(AllocateReduced(context, *this, num_tensors_, &reduced));
    if (*step->finite) {
      Settings::DecodeOnGpu(step->codecs, *step->decoder, reduced, /*adds=*/false, queue);
      return absl::OkStatus();
    }
    for (int i = 0; i < num_tensors_; ++i) queue->Zero(reduced[i], 4 * shape(i).num_elements());
    return absl::OkStatus();
  }

  const TensorShape& shape(int i) const { return shapes_[i]; }

 private:
  using Base::num_tensors_;

  std::vector<TensorShape> shapes_;
};

// A payload with the non-finite flag changes nothing.
template <typename Settings>
class PutBackInputs : public PayloadInputs<Settings> {
 public:
  using Step = DecodeStep<Settings>;

  absl::Status Read(OpKernelContext* context, Step* step) const {
    return ReadFrom(context, /*payload_input=*/this->num_tensors_, step);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    if (!step->decoder->finite()) return absl::OkStatus();
    HostTensors host(context);
    std::vector<float*> values;
    TF_RETURN_IF_ERROR(host.Variables(&step->residuals, /*writes=*/true, &values));
    step->decoder->AddTo(values);
    return host.Finish();
  }

  absl::Status OnGpu(OpKernelContext*, Step* step, TensorFlowQueue* queue) const {
    if (!step->decoder->finite()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(queue->Unshare(&step->residuals));
    Settings::DecodeOnGpu(step->codecs, *step->decoder, step->residuals.all_data(),
                           /*adds=*/true, queue);
    return absl::OkStatus();
  }

 protected:
  absl::Status ReadFrom(OpKernelContext* context, int payload_input, Step* step) const {
    const Tensor& payload = context->input(payload_input);
    std::vector<int64_t> main;
    TF_RETURN_IF_ERROR(this->GetMain(context, &main));
    TF_RETURN_IF_ERROR(step->residuals.Lock(context, this->num_tensors_));
    step->codecs = this->NewCodecs(main, step->residuals);
    step->decoder = Settings::NewDecoder(step->codecs, this->fingerprint_, PlanOf(main),
                                         ThreadPool(context));
    return ToTensorFlow(step->decoder->Read(payload.flat<int32_t>().data(), 1,
                                            payload.NumElements(), std::nullopt));
  }
};

}  // namespace gradcomp

// Registers the kernels of <Method>Decode and <Method>PutBack for both devices. The last argument
// has HostMemory(...) for the method's own inputs.
#define GRADCOMP_DECODE_KERNELS(method, Settings, own_inputs)                          \
  REGISTER_KERNEL_BUILDER(Name(method "Decode").Device(DEVICE_CPU),                    \
                          OpOnHost<DecodeInputs<Settings>>);                           \
  REGISTER_KERNEL_BUILDER(Name(method "PutBack").Device(DEVICE_CPU),                   \
                          OpOnHost<PutBackInputs<Settings>>);                          \
  REGISTER_KERNEL_BUILDER(Name(method "Decode")                                        \
                              .Device(DEVICE_GPU)                                      \
                              .HostMemory("payloads")                                  \
                              .HostMemory("step")                                      \
                              .HostMemory("finite") own_inputs,                        \
                          OpOnGpu<DecodeInputs<Settings>>);                            \
  REGISTER_KERNEL_BUILDER(Name(method "PutBack")                                       \
                              .Device(DEVICE_GPU)                                      \
                              .HostMemory("residuals")                                 \
                              .HostMemory("payload") own_inputs,                       \
                          OpOnGpu<PutBackInputs<Settings>>)
