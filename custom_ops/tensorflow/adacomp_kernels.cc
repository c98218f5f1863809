// AdaComp's ops on CPUs and GPUs. Only payloads, and small facts about them, are copied between a
// GPU and the host. No op waits for a stream.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "../gpu/adacomp_on_gpu.h"
#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/adacomp_layout.h"
#include "../kernels/payload.h"
#include "../kernels/precondition.h"
#include "adam_support.h"
#include "decode_ops.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

class AdaCompEncodeWork {
 public:
  // The data of a step. The variables, residuals and then second moments, are locked during the
  // lifetime of this object.
  struct Step {
    int64_t step = 0;
    std::vector<int64_t> bin_sizes;
    std::vector<AdamSettings> adam;  // for each gradient; empty without second moments
    std::vector<const float*> squares;  // for each gradient; see EncoderTensor
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

  // Reads and checks everything except the values of tensors.
  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(GetScalar(context, 2 * num_tensors_, "step", &step->step));
    TF_RETURN_IF_ERROR(
        GetSettings(context, context->num_inputs() - 1, "bin_sizes", &step->bin_sizes));
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckBinSizes(step->bin_sizes, num_tensors_)));
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

  // If the outputs cannot be allocated, the variables do not change.
  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::vector<EncoderTensor> tensors;
    TF_RETURN_IF_ERROR(TensorsOnHost(context, step, &host, &tensors));
    const std::vector<std::unique_ptr<Tensor>> replaced = TakeGradients(&host, &tensors);
    AdaCompEncoder encoder(tensors, scale_factor_, ThreadPool(context));
    const bool finite = encoder.Run();
    const PayloadHeader header = Header(*step, finite, encoder.body_words());
    Outputs outputs;
    const absl::Status allocated = Allocate(context, header, &outputs);
    if (!allocated.ok()) encoder.Rollback();
    TF_RETURN_IF_ERROR(allocated);
    if (finite) {
      encoder.WriteBody(outputs.payload + kHeaderWords);
      for (int i = 0; i < num_tensors_; ++i) {
        if (replaced[i]) *step->variables.tensor(i) = *replaced[i];
      }
    }
    Finish(header, outputs);
    return host.Finish();
  }

  absl::Status OnGpu(OpKernelContext* context, std::shared_ptr<Step> step, TensorFlowQueue* queue,
                     const DoneCallback& done) const {
    TF_RETURN_IF_ERROR(queue->Unshare(&step->variables));
    auto* summary =
        static_cast<gpu::EncodeSummary*>(queue->AllocateOnHost(sizeof(gpu::EncodeSummary)));
    const EncodedOnGpu encoded = EncodeAdaComp(Tensors(context, *step), scale_factor_, queue);
    queue->CopyToHost(encoded.summary, sizeof *summary, summary);
    step->variables.Unlock();
    queue->Continue(done, [this, context, done, queue, step, encoded, summary] {
      Send(context, done, queue, *step, encoded, *summary);
    });
    return absl::OkStatus();
  }

 private:
  // Must be called after Unshare of the variables.
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

  // The outputs in host memory.
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

  // Writes the other outputs, once the body is written.
  void Finish(const PayloadHeader& header, const Outputs& outputs) const {
    WriteHeader(header, outputs.payload);
    std::fill_n(outputs.tensor_bytes, num_tensors_, 0);
    for (int i = 0; i < num_tensors_ && !header.non_finite(); ++i) {
      const int64_t words = EntryOf(outputs.payload + kHeaderWords, i).code_words;
      outputs.tensor_bytes[i] = 4 * (kTableEntryWords + words);
    }
  }

  // Copies the payload, once its length is known.
  void Send(OpKernelContext* context, const DoneCallback& done, TensorFlowQueue* queue,
            const Step& step, const EncodedOnGpu& encoded,
            const gpu::EncodeSummary& summary) const {
    const PayloadHeader header = Header(step, summary.finite, summary.body_words);
    Outputs outputs;
    const absl::Status allocated = Allocate(context, header, &outputs);
    const CurrentContext current(queue->driver(), queue->context());
    if (!allocated.ok()) {
      // No op has seen the changed variables, because all other ops wait for this op.
      TakeBackAdaComp(encoded, queue);
      queue->KeepUntilDone().IgnoreError();  // the first error is reported
      context->SetStatus(allocated);
      return done();
    }
    queue->CopyToHost(encoded.body, 4 * summary.body_words, outputs.payload + kHeaderWords);
    queue->Finish(done, [this, header, outputs] { Finish(header, outputs); });
  }

  int first_squares() const { return 2 * num_tensors_ + num_moments_ + 2; }  // input

  absl::Status CheckMomentShapes(const LockedResiduals& variables) const {
    for (int i = 0; i < num_moments_; ++i) {
      const TensorShape& shape = variables.shape(num_tensors_ + i);
      if (shape == variables.shape(i)) continue;
      return InvalidArgument("second moment ", i, " has shape ", shape.DebugString(),
                             "; expected ", variables.shape(i).DebugString(),
                             ", the shape of its residual");
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

  // Takes the memory of undivided gradients that nothing else uses, for the new residuals.
  std::vector<std::unique_ptr<Tensor>> TakeGradients(HostTensors* host,
                                                     std::vector<EncoderTensor>* tensors) const {
    std::vector<std::unique_ptr<Tensor>> taken(num_tensors_);
    for (int i = 0; i < num_tensors_ && num_moments_ == 0; ++i) {
      taken[i] = host->Take(num_tensors_ + i);
      if (taken[i]) (*tensors)[i].replaced_gradient = taken[i]->flat<float>().data();
    }
    return taken;
  }

  int num_tensors_;
  float scale_factor_;
  int64_t fingerprint_;
  int num_moments_;
  AdamAttributes adam_;
  SquaresInputs squares_;
};

struct AdaCompSettings {
  using Decoder = AdaCompDecoder;
  static constexpr const char* kMain = "bin_sizes";
  static constexpr auto kCheck = CheckBinSizes;

  absl::Status Read(OpKernelConstruction*) { return absl::OkStatus(); }
  DecoderTensor NewCodec(int64_t size, int64_t bin_size) const { return {size, bin_size}; }

  static std::unique_ptr<Decoder> NewDecoder(const std::vector<DecoderTensor>& tensors,
                                             int64_t fingerprint, int64_t /*plan*/,
                                             const ParallelFor& parallel_for) {
    return std::make_unique<Decoder>(tensors, fingerprint, parallel_for);
  }
  static void DecodeOnGpu(const std::vector<DecoderTensor>&, const Decoder& decoder,
                           const std::vector<float*>& values, bool adds, GpuQueue* queue) {
    DecodeAdaComp(decoder, values, adds, queue);
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
                        AsyncOpOnGpu<AdaCompEncodeWork>);
REGISTER_KERNEL_BUILDER(Name("AdaCompEncode").Device(DEVICE_CPU), OpOnHost<AdaCompEncodeWork>);
GRADCOMP_DECODE_KERNELS("AdaComp", AdaCompSettings, .HostMemory("bin_sizes"));

}  // namespace
}  // namespace gradcomp
