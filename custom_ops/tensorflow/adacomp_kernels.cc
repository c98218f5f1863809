// AdaComp's ops on CPUs and GPUs. Between a GPU and the host, only payloads and small facts about
// them are copied. No op waits for a stream.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../gpu/adacomp_on_gpu.h"
#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/adacomp_layout.h"
#include "../kernels/payload.h"
#include "../kernels/precondition.h"
#include "adam_support.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

// Reads the last input of each op.
absl::Status GetBinSizes(OpKernelContext* context, int num_tensors,
                         std::vector<int64_t>* bin_sizes) {
  TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, "bin_sizes", bin_sizes));
  return ToTensorFlow(CheckBinSizes(*bin_sizes, num_tensors));
}

class AdaCompEncodeInputs {
 public:
  // Of one step. The variables, residuals and then second moments, are locked as long as it lives.
  struct Step {
    int64_t step = 0;
    std::vector<int64_t> bin_sizes;
    std::vector<AdamSettings> adam;  // of each gradient; none without second moments
    std::vector<const float*> squares;  // of each gradient, as of EncoderTensor
    LockedResiduals variables;
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    TF_RETURN_IF_ERROR(context->GetAttr("scale_factor", &scale_factor_));
    TF_RETURN_IF_ERROR(context->GetAttr("fingerprint", &fingerprint_));
    TF_RETURN_IF_ERROR(context->GetAttr("M", &num_moments_));
    TF_RETURN_IF_ERROR(squares_.Read(context, num_tensors_));
    TF_RETURN_IF_ERROR(
        CheckOneGradientEach(context, num_tensors_, num_moments_ + 3 + squares_.size()));
    if (num_moments_ == 0) return absl::OkStatus();
    if (num_moments_ != num_tensors_) {
      return InvalidArgument(num_moments_, " second moments for ", num_tensors_,
                             " residuals; expected one for each residual, or none");
    }
    return adam_.Read(context);
  }

  // Reads and checks everything but the values of tensors.
  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(GetScalar(context, 2 * num_tensors_, "step", &step->step));
    TF_RETURN_IF_ERROR(GetBinSizes(context, num_tensors_, &step->bin_sizes));
    if (num_moments_ > 0) {
      const int adam_step = 2 * num_tensors_ + 1 + num_moments_;
      TF_RETURN_IF_ERROR(adam_.At(context, adam_step, "adam_step", num_tensors_, &step->adam));
    }
    TF_RETURN_IF_ERROR(step->variables.Lock(
        context, {{0, num_tensors_, "residual"},
                  {2 * num_tensors_ + 1, num_moments_, "second moment"}}));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, step->variables, num_tensors_));
    step->squares.resize(num_tensors_);
    for (int i = 0; i < num_tensors_; ++i) {
      const TensorShape& gradient = context->input(num_tensors_ + i).shape();
      TF_RETURN_IF_ERROR(
          squares_.At(context, first_squares(), i, gradient, &step->squares[i]));
    }
    return CheckMomentShapes(step->variables);
  }

  // Where the outputs cannot be allocated, variables are what they were.
  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<EncoderTensor> tensors;
    TF_RETURN_IF_ERROR(TensorsOnHost(context, step, &host, &tensors));
    AdaCompEncoder encoder(tensors, scale_factor_, ThreadPool(context));
    const bool finite = encoder.Run();
    const PayloadHeader header = Header(*step, finite, encoder.body_words());
    Outputs outputs;
    const absl::Status allocated = Allocate(context, header, &outputs);
    if (!allocated.ok()) encoder.Rollback();
    TF_RETURN_IF_ERROR(allocated);
    if (finite) encoder.WriteBody(outputs.payload + kHeaderWords);
    Finish(header, outputs);
    return host.Finish();
  }

  // After Unshare of the variables.
  std::vector<EncoderTensor> Tensors(OpKernelContext* context, const Step& step) const {
    std::vector<EncoderTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      const Tensor& gradient = context->input(num_tensors_ + i);
      tensors.push_back({step.variables.data(i), gradient.data(), ToGradientType(gradient.dtype()),
                         gradient.NumElements(), step.bin_sizes[i],
                         num_moments_ > 0 ? step.variables.data(num_tensors_ + i) : nullptr,
                         step.squares[i], num_moments_ > 0 ? step.adam[i] : AdamSettings{}});
    }
    return tensors;
  }

  PayloadHeader Header(const Step& step, bool finite, int64_t body_words) const {
    PayloadHeader header;
    header.method = static_cast<uint16_t>(Method::kAdaComp);
    header.fingerprint = fingerprint_;
    header.plan = PlanOf(step.bin_sizes);
    header.step = step.step;
    header.num_tensors = num_tensors_;
    header.flags = finite ? 0 : kNonFiniteFlag;
    header.length = kHeaderWords + body_words;
    return header;
  }

  // The outputs, on the host.
  struct Outputs {
    int32_t* payload = nullptr;
    int64_t* tensor_bytes = nullptr;
  };

  absl::Status Allocate(OpKernelContext* context, const PayloadHeader& header,
                        Outputs* outputs) const {
    Tensor* payload;
    TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, header.length, &payload));
    Tensor* tensor_bytes;
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({num_tensors_}), &tensor_bytes));
    *outputs = {payload->flat<int32_t>().data(), tensor_bytes->flat<int64_t>().data()};
    return absl::OkStatus();
  }

  // Once the body is written: all the rest.
  void Finish(const PayloadHeader& header, const Outputs& outputs) const {
    WriteHeader(header, outputs.payload);
    std::fill_n(outputs.tensor_bytes, num_tensors_, 0);
    for (int i = 0; i < num_tensors_ && !header.non_finite(); ++i) {
      const int64_t words = EntryOf(outputs.payload + kHeaderWords, i).code_words;
      outputs.tensor_bytes[i] = 4 * (kTableEntryWords + words);
    }
  }

  float scale_factor() const { return scale_factor_; }

 private:
  int first_squares() const { return 2 * num_tensors_ + num_moments_ + 2; }  // input

  absl::Status CheckMomentShapes(const LockedResiduals& variables) const {
    for (int i = 0; i < num_moments_; ++i) {
      const TensorShape& shape = variables.shape(num_tensors_ + i);
      if (shape == variables.shape(i)) continue;
      return InvalidArgument("second moment ", i, " has shape ", shape.DebugString(),
                             "; expected ", variables.shape(i).DebugString(),
                             ", that of its residual");
    }
    return absl::OkStatus();
  }

  absl::Status TensorsOnHost(OpKernelContext* context, Step* step, HostTensors* host,
                             std::vector<EncoderTensor>* tensors) const {
    std::vector<Source> sources;
    std::vector<float*> moments;
    TF_RETURN_IF_ERROR(
        host->Sources(&step->variables, num_tensors_, /*writes=*/true, &sources, &moments));
    *tensors = Tensors(context, *step);
    for (int i = 0; i < num_tensors_; ++i) {
      EncoderTensor& tensor = (*tensors)[i];
      tensor.residual = sources[i].residual;
      tensor.gradient = sources[i].gradient;
      if (tensor.second_moment) tensor.second_moment = moments[i];
      if (!tensor.squares) continue;
      const Tensor* squares;
      TF_RETURN_IF_ERROR(host->Input(first_squares() + i, &squares));
      tensor.squares = squares->flat<float>().data();
    }
    return absl::OkStatus();
  }

  int num_tensors_;
  float scale_factor_;
  int64_t fingerprint_;
  int num_moments_;
  AdamAttributes adam_;
  SquaresInputs squares_;
};

class AdaCompDecodeInputs {
 public:
  struct Step {
    std::unique_ptr<AdaCompDecoder> decoder;  // of payloads that are checked
    bool* finite = nullptr;                   // the output
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    int64_t num_tensors;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors));
    TF_RETURN_IF_ERROR(context->GetAttr("fingerprint", &fingerprint_));
    TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes_));
    if (static_cast<int64_t>(shapes_.size()) != num_tensors) {
      return InvalidArgument("shapes has ", shapes_.size(), " entries; expected ", num_tensors,
                             ": give one shape for each tensor");
    }
    for (int64_t i = 0; i < num_tensors; ++i) {
      TF_RETURN_IF_ERROR(ToTensorFlow(CheckTensorSize(i, shapes_[i].num_elements())));
    }
    return absl::OkStatus();
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    const Tensor& payloads = context->input(0);
    int64_t expected_step;
    TF_RETURN_IF_ERROR(GetScalar(context, 1, "step", &expected_step));
    TF_RETURN_IF_ERROR(CheckRows(payloads));
    std::vector<int64_t> bin_sizes;
    TF_RETURN_IF_ERROR(GetBinSizes(context, static_cast<int>(shapes_.size()), &bin_sizes));
    std::vector<DecoderTensor> tensors;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      tensors.push_back({shapes_[i].num_elements(), bin_sizes[i]});
    }
    step->decoder = std::make_unique<AdaCompDecoder>(tensors, fingerprint_, ThreadPool(context));
    TF_RETURN_IF_ERROR(
        ToTensorFlow(step->decoder->Read(payloads.flat<int32_t>().data(), payloads.dim_size(0),
                                         payloads.dim_size(1), expected_step)));
    Tensor* finite;
    TF_RETURN_IF_ERROR(context->allocate_output(static_cast<int>(shapes_.size()), {}, &finite));
    step->finite = finite->flat<bool>().data();
    return absl::OkStatus();
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<float*> reduced(shapes_.size());
    for (size_t i = 0; i < shapes_.size(); ++i) {
      TF_RETURN_IF_ERROR(host.Output(static_cast<int>(i), shapes_[i], &reduced[i]));
    }
    *step->finite = step->decoder->Reduce(reduced);
    return host.Finish();
  }

  const std::vector<TensorShape>& shapes() const { return shapes_; }

 private:
  int64_t fingerprint_;
  std::vector<TensorShape> shapes_;
};

class AdaCompPutBackInputs {
 public:
  struct Step {
    LockedResiduals residuals;
    std::unique_ptr<AdaCompDecoder> decoder;  // of a payload that is checked
  };

  absl::Status ReadAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    return context->GetAttr("fingerprint", &fingerprint_);
  }

  absl::Status Read(OpKernelContext* context, Step* step) const {
    const Tensor& payload = context->input(payload_input());
    std::vector<int64_t> bin_sizes;
    TF_RETURN_IF_ERROR(GetBinSizes(context, num_tensors_, &bin_sizes));
    TF_RETURN_IF_ERROR(step->residuals.Lock(context, num_tensors_));
    std::vector<DecoderTensor> tensors;
    for (int i = 0; i < num_tensors_; ++i) {
      tensors.push_back({step->residuals.shape(i).num_elements(), bin_sizes[i]});
    }
    step->decoder = std::make_unique<AdaCompDecoder>(tensors, fingerprint_, ThreadPool(context));
    return ToTensorFlow(step->decoder->Read(payload.flat<int32_t>().data(), 1,
                                            payload.NumElements(), std::nullopt));
  }

  // Does nothing for a payload that is not finite.
  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    if (!step->decoder->finite()) return absl::OkStatus();
    HostTensors host(context);
    std::vector<float*> values;
    TF_RETURN_IF_ERROR(host.Variables(&step->residuals, /*writes=*/true, &values));
    step->decoder->AddTo(values);
    return host.Finish();
  }

  int payload_input() const { return num_tensors_; }

 private:
  int num_tensors_;
  int64_t fingerprint_;
};

class AdaCompEncodeOnGpu : public AdaCompEncodeInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->variables));
    auto* summary =
        static_cast<gpu::EncodeSummary*>(queue->AllocateOnHost(sizeof(gpu::EncodeSummary)));
    const EncodedOnGpu encoded = EncodeAdaComp(Tensors(context, *step), scale_factor(), queue);
    queue->CopyToHost(encoded.summary, sizeof *summary, summary);
    step->variables.Unlock();
    queue->Continue(done, [this, context, done, queue, step, encoded, summary] {
      Send(context, done, queue, *step, encoded, *summary);
    });
    return absl::OkStatus();
  }

 private:
  // Copies the payload once its length is known.
  void Send(OpKernelContext* context, const DoneCallback& done, TensorFlowQueue* queue,
            const Step& step, const EncodedOnGpu& encoded,
            const gpu::EncodeSummary& summary) const {
    const PayloadHeader header = Header(step, summary.finite, summary.body_words);
    Outputs outputs;
    const absl::Status allocated = Allocate(context, header, &outputs);
    const CurrentContext current(queue->driver(), queue->context());
    if (!allocated.ok()) {
      // No op has seen the variables since: each waits for this one.
      TakeBackAdaComp(encoded, queue);
      queue->KeepUntilDone().IgnoreError();  // the first error counts
      context->SetStatus(allocated);
      return done();
    }
    queue->CopyToHost(encoded.body, 4 * summary.body_words, outputs.payload + kHeaderWords);
    queue->Finish(done, [this, header, outputs] { Finish(header, outputs); });
  }
};

class AdaCompDecodeOnGpu : public AdaCompDecodeInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    std::vector<float*> reduced;
    for (size_t i = 0; i < shapes().size(); ++i) {
      Tensor* output;
      TF_RETURN_IF_ERROR(context->allocate_output(static_cast<int>(i), shapes()[i], &output));
      reduced.push_back(output->flat<float>().data());
    }
    const Tensor& payloads = context->input(0);
    *step->finite = ReduceAdaComp(*step->decoder, payloads.flat<int32_t>().data(),
                                  payloads.NumElements(), reduced, queue);
    return absl::OkStatus();
  }
};

class AdaCompPutBackOnGpu : public AdaCompPutBackInputs {
 public:
  absl::Status OnGpu(OpKernelContext* context, Step* step, TensorFlowQueue* queue) const {
    if (!step->decoder->finite()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(queue->Unshare(&step->residuals));
    const Tensor& payload = context->input(payload_input());
    AddAdaComp(*step->decoder, payload.flat<int32_t>().data(), payload.NumElements(),
               step->residuals.all_data(), queue);
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("step")
                            .HostMemory("second_moments")
                            .HostMemory("adam_step")
                            .HostMemory("bin_sizes")
                            .HostMemory("payload")
                            .HostMemory("tensor_bytes"),
                        AsyncOpOnGpu<AdaCompEncodeOnGpu>);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode")
                            .Device(DEVICE_GPU)
                            .HostMemory("payloads")
                            .HostMemory("step")
                            .HostMemory("bin_sizes")
                            .HostMemory("finite"),
                        OpOnGpu<AdaCompDecodeOnGpu>);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack")
                            .Device(DEVICE_GPU)
                            .HostMemory("residuals")
                            .HostMemory("payload")
                            .HostMemory("bin_sizes"),
                        OpOnGpu<AdaCompPutBackOnGpu>);

REGISTER_KERNEL_BUILDER(Name("AdaCompEncode").Device(DEVICE_CPU), OpOnHost<AdaCompEncodeInputs>);
REGISTER_KERNEL_BUILDER(Name("AdaCompDecode").Device(DEVICE_CPU), OpOnHost<AdaCompDecodeInputs>);
REGISTER_KERNEL_BUILDER(Name("AdaCompPutBack").Device(DEVICE_CPU), OpOnHost<AdaCompPutBackInputs>);

}  // namespace
}  // namespace gradcomp
