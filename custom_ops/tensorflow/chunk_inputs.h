// What the kernels of chunk ops read from their inputs and write to their outputs, and what they do on the
// host, whatever the device.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNK_INPUTS_H_
#define TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNK_INPUTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "../kernels/chunks.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

// Residuals, gradients, chunk sizes and groups are the first inputs; those of the op itself follow.
class ChunkInputs {
 public:
  // What an op works on, locked for as long as this lives.
  struct Work {
    LockedResiduals residuals;
    std::unique_ptr<ChunkLayout> layout;
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context, int num_own_inputs);

  absl::Status Begin(tensorflow::OpKernelContext* context, Work* work) const;

  absl::Status GetFlag(tensorflow::OpKernelContext* context, int i, const char* name,
                       bool* flag) const;

  // The first input of its own, checked.
  absl::Status GetOffsets(tensorflow::OpKernelContext* context, const Work& work,
                          const int32_t** offsets) const;

  int own_index(int i) const { return 2 * num_tensors_ + 2 + i; }
  const tensorflow::Tensor& own_input(tensorflow::OpKernelContext* context, int i) const {
    return context->input(own_index(i));
  }
  int num_tensors() const { return num_tensors_; }

 private:
  int num_tensors_;
};

class ChunkSelectInputs : public ChunkInputs {
 public:
  struct Step {
    Work work;
    bool lead = false;
    int32_t* offsets = nullptr;  // the outputs
    bool* finite = nullptr;
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return ChunkInputs::ReadAttributes(context, 1);
  }
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;
};

class ChunkTakeInputs : public ChunkInputs {
 public:
  struct Step {
    Work work;
    const int32_t* offsets = nullptr;
    float* values = nullptr;  // the output; the flag behind them is written
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context) {
    return ChunkInputs::ReadAttributes(context, 2);
  }
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;
};

class ChunkApplyInputs : public ChunkInputs {
 public:
  struct Step {
    Work work;
    const int32_t* offsets = nullptr;
    const float* totals = nullptr;
    const float* rests = nullptr;  // null: none
    bool own_finite = false;
    bool finite = false;  // with the totals
  };

  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // Writes the output `all_finite`, too.
  absl::Status Read(tensorflow::OpKernelContext* context, Step* step) const;
  absl::Status OnHost(tensorflow::OpKernelContext* context, Step* step) const;

  float filter() const { return filter_; }

 private:
  float filter_;
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_TENSORFLOW_CHUNK_INPUTS_H_
