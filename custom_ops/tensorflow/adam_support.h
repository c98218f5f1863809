// The attributes and the input that define the division of gradients by second moments.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/precondition.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

class AdamAttributes {
 public:
  // Reads and checks beta_2, epsilon and scale.
  absl::Status Read(OpKernelConstruction* context);

  // Reads and checks the input, which errors call `name`: Adam's step, from 1 on, for each
  // gradient, or as a scalar for all gradients.
  absl::Status At(OpKernelContext* context, int input, const char* name,
                  int num_gradients, std::vector<AdamSettings>* settings) const;

 private:
  AdamSettings InStep(int64_t step) const;

  float beta_2_;
  float epsilon_;
  bool corrects_epsilon_;
  float scale_;
};

// The inputs that replace the squares of gradients: one for each gradient, in its shape or empty;
// or no inputs.
class SquaresInputs {
 public:
  // Reads and checks the number of squares, the attribute S.
  absl::Status Read(OpKernelConstruction* context, int num_gradients);

  int size() const { return num_squares_; }

  // Reads and checks the squares of a gradient; null if the gradient itself is squared. `first` is
  // the first of the inputs.
  absl::Status At(OpKernelContext* context, int first, int i,
                  const TensorShape& gradient, const float** squares) const;

 private:
  int num_squares_ = 0;
};

}  // namespace gradcomp
