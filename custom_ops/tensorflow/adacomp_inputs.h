// The inputs and outputs of AdaComp's ops on any device, and their work on the host.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_INPUTS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_INPUTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/payload.h"
#include "../kernels/precondition.h"
#include "adam_support.h"
#include "host_tensors.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// The last input of each op.
absl::Status GetBinSizes(tensorflow::OpKernelContext* context, int num_tensors,
                         std::vector<int64_t>* bin_sizes);

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

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // Reads and checks everything but the values of tensors.
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;

  // Where the outputs cannot be allocated, variables are what they were.
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;

  // After Unshare of the variables.
  std::vector<EncoderTensor> Tensors(tensorflow::OpKernelContext* context, const Step& step) const;

  PayloadHeader Header(const Step& step, bool finite, int64_t body_words) const;

  // The outputs, on the host.
  struct Outputs {
    int32_t* payload = nullptr;
    int64_t* tensor_bytes = nullptr;
  };
  absl::Status Allocate(tensorflow::OpKernelContext* context, const PayloadHeader& header,
                        Outputs* outputs) const;

  // Once the body is written: all the rest.
  void Finish(const PayloadHeader& header, const Outputs& outputs) const;

  float scale_factor() const { return scale_factor_; }

 private:
  int first_squares() const { return 2 * num_tensors_ + num_moments_ + 2; }  // input
  absl::Status CheckMomentShapes(const LockedResiduals& variables) const;
  absl::Status TensorsOnHost(tensorflow::OpKernelContext* context, Step* step, HostTensors* host,
                             std::vector<EncoderTensor>* tensors) const;

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

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;

  const std::vector<tensorflow::TensorShape>& shapes() const { return shapes_; }

 private:
  int64_t fingerprint_;
  std::vector<tensorflow::TensorShape> shapes_;
};

class AdaCompPutBackInputs {
 public:
  struct Step {
    LockedResiduals residuals;
    std::unique_ptr<AdaCompDecoder> decoder;  // of a payload that is checked
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;

  // Does nothing for a payload that is not finite.
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;

  int payload_input() const { return num_tensors_; }

 private:
  int num_tensors_;
  int64_t fingerprint_;
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_INPUTS_H_
