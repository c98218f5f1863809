// The inputs that PowerSGD's ops share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kernels/power_sgd.h"
#include "host_tensors.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {

inline int64_t ColumnsOf(const TensorShape& shape) {
  return shape.dims() == 0 ? 1 : shape.dim_size(shape.dims() - 1);
}

inline int64_t RowsOf(const TensorShape& shape) {
  return shape.num_elements() == 0 ? 0 : shape.num_elements() / ColumnsOf(shape);
}

// The factors of an op: none, Q as [columns, R], or P above Q as [rows + columns, R].
enum class FactorInputs { kNone, kRight, kBoth };

// The inputs are residuals, gradients, factors if the op has any, the op's own inputs, and the ranks.
class PowerSgdInputs {
 public:
  // The variables of an op, residuals and then factors, which are locked during the lifetime of
  // this object.
  struct Work {
    std::vector<int64_t> ranks;
    LockedResiduals variables;
  };

  absl::Status ReadAttributes(OpKernelConstruction* context, FactorInputs factors,
                              int num_own_inputs) {
    factors_ = factors;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
    const int num_others = own_index(num_own_inputs) - 2 * num_tensors_ + 1;
    return CheckOneGradientEach(context, num_tensors_, num_others);
  }

  absl::Status Begin(OpKernelContext* context, Work* work) const {
    TF_RETURN_IF_ERROR(GetSettings(context, context->num_inputs() - 1, "ranks", &work->ranks));
    TF_RETURN_IF_ERROR(ToTensorFlow(CheckRanks(work->ranks, num_tensors_)));
    const int num_factors = has_factors() ? num_tensors_ : 0;
    TF_RETURN_IF_ERROR(
        work->variables.Lock(context, {{0, num_tensors_, "residual"},
                                       {2 * num_tensors_, num_factors, "factor"}}));
    TF_RETURN_IF_ERROR(CheckGradientShapes(context, work->variables, num_tensors_));
    for (int i = 0; i < num_tensors_; ++i) {
      const TensorShape& shape = work->variables.shape(i);
      TF_RETURN_IF_ERROR(
          ToTensorFlow(CheckRank(i, work->ranks[i], RowsOf(shape), ColumnsOf(shape))));
    }
    return has_factors() ? CheckFactors(*work) : absl::OkStatus();
  }

  // Returns the tensors on the op's device. Variables may be shared while they are only read.
  std::vector<PowerSgdTensor> Tensors(OpKernelContext* context, const Work& work) const {
    std::vector<PowerSgdTensor> tensors;
    const std::vector<Source> sources = SourcesOf(context, work.variables, num_tensors_);
    for (int i = 0; i < num_tensors_; ++i) tensors.push_back(TensorOf(work, i, sources[i]));
    return tensors;
  }

  // Returns the tensors on the host, with the variables' data.
  absl::Status TensorsOnHost(Work* work, bool writes, HostTensors* host,
                             std::vector<PowerSgdTensor>* tensors,
                             std::vector<float*>* factors) const {
    std::vector<Source> sources;
    TF_RETURN_IF_ERROR(host->Sources(&work->variables, num_tensors_, writes, &sources, factors));
    for (int i = 0; i < num_tensors_; ++i) tensors->push_back(TensorOf(*work, i, sources[i]));
    return absl::OkStatus();
  }

  // Reads an own input, a vector of `size` elements that errors call `name`.
  absl::Status GetVector(OpKernelContext* context, int own_input, const char* name, int64_t size,
                         const float** values) const {
    const Tensor& tensor = context->input(own_index(own_input));
    if (tensor.shape() != TensorShape({size})) {
      return InvalidArgument(name, " has shape ", tensor.shape().DebugString(), "; expected [", size,
                             "] for these tensors and ranks");
    }
    *values = tensor.flat<float>().data();
    return absl::OkStatus();
  }

  // Allocates the outputs for the reduced gradients, in the gradients' memory if possible.
  absl::Status ReducedOnHost(const Work& work, HostTensors* host,
                             std::vector<float*>* reduced) const {
    reduced->resize(num_tensors_);
    for (int i = 0; i < num_tensors_; ++i) {
      TF_RETURN_IF_ERROR(host->Output(i, work.variables.shape(i), &(*reduced)[i],
                                      /*forwarded_input=*/num_tensors_ + i));
    }
    return absl::OkStatus();
  }

  void FillWithZeros(const Work& work, const std::vector<float*>& reduced) const {
    for (int i = 0; i < num_tensors_; ++i) {
      std::fill_n(reduced[i], work.variables.shape(i).num_elements(), 0.0f);
    }
  }

  int own_index(int i) const { return (has_factors() ? 3 : 2) * num_tensors_ + i; }
  int num_tensors() const { return num_tensors_; }

 private:
  // Checks the factors' shapes. A factor may have more columns than the rank; the factor of a
  // tensor that is sent whole may be empty.
  absl::Status CheckFactors(const Work& work) const {
    for (int i = 0; i < num_tensors_; ++i) {
      const int64_t rank = work.ranks[i];
      const TensorShape& matrix = work.variables.shape(i);
      const int64_t rows =
          ColumnsOf(matrix) + (factors_ == FactorInputs::kBoth ? RowsOf(matrix) : 0);
      const TensorShape& shape = work.variables.shape(num_tensors_ + i);
      if (rank == 0 && shape == TensorShape({0})) continue;
      if (shape.dims() == 2 && shape.dim_size(0) == rows && shape.dim_size(1) >= rank) continue;
      return InvalidArgument("factor ", i, " has shape ", shape.DebugString(), "; expected [",
                             rows, ",", rank, "], or more columns", rank == 0 ? ", or [0]" : "");
    }
    return absl::OkStatus();
  }

  PowerSgdTensor TensorOf(const Work& work, int i, const Source& source) const {
    const TensorShape& shape = work.variables.shape(i);
    int64_t factor_columns = 0;
    if (has_factors() && work.variables.shape(num_tensors_ + i).dims() == 2) {
      factor_columns = work.variables.shape(num_tensors_ + i).dim_size(1);
    }
    return {source.residual, source.gradient, source.type,   RowsOf(shape),
            ColumnsOf(shape), work.ranks[i],  factor_columns};
  }

  bool has_factors() const { return factors_ != FactorInputs::kNone; }

  FactorInputs factors_;
  int num_tensors_;
};

}  // namespace gradcomp
