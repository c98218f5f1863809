// What the kernels of AdaComp's ops read from their inputs and write to their outputs, whatever the
// device.
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
  int first_squares() const { return 2 * num_tensors_ + num_moments_ + 2; }  // input

 private:
  absl::Status CheckMomentShapes(const LockedResiduals& variables) const;

  int num_tensors_;
  float scale_factor_;
  int64_t fingerprint_;
  int num_moments_;
  AdamAttributes adam_;
  SquaresInputs squares_;
};

// Of AdaCompDecode.
class AdaCompDecodeInputs {
 public:
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // Reads and checks all payloads. The decoder needs them as long as it lives.
  absl::Status Read(tensorflow::OpKernelContext* context,
                    std::unique_ptr<AdaCompDecoder>* decoder) const;

  absl::Status AllocateOutputs(tensorflow::OpKernelContext* context,
                               std::vector<float*>* reduced, bool** finite) const;

  const std::vector<tensorflow::TensorShape>& shapes() const { return shapes_; }

 private:
  int64_t fingerprint_;
  std::vector<tensorflow::TensorShape> shapes_;
};

// Of AdaCompPutBack.
class AdaCompPutBackInputs {
 public:
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // Locks the residuals, and reads and checks the payload. There is nothing to do if it is not
  // finite.
  absl::Status Read(tensorflow::OpKernelContext* context, LockedResiduals* residuals,
                    std::unique_ptr<AdaCompDecoder>* decoder) const;

  int payload_input() const { return num_tensors_; }

 private:
  int num_tensors_;
  int64_t fingerprint_;
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_ADACOMP_INPUTS_H_
