// AdaComp's encoder, which turns the residuals and gradients of a step into a payload.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common.h"
#include "floats.h"
#include "precondition.h"
#include "scan_bins.h"

namespace gradcomp {

struct EncoderTensor {
  float* residual;  // updated in place, unless the new residual replaces the gradient
  const void* gradient;
  GradientType type;
  int64_t size;      // elements
  int64_t bin_size;  // 0: sent whole
  float* second_moment = nullptr;  // updated in place; if given, the gradient is divided by its root
  const float* squares = nullptr;  // see PreconditionTensor
  AdamSettings adam = {};
  // The memory of `gradient`, if the new residual replaces the gradient. The gradient is then float32,
  // and not divided.
  float* replaced_gradient = nullptr;
};

// If tensors have second moments, the encoder encodes the same bits as after Precondition.
class AdaCompEncoder {
 public:
  AdaCompEncoder(const std::vector<EncoderTensor>& tensors, float scale_factor,
                 ParallelFor parallel_for, Simd simd = BestSimd());
  ~AdaCompEncoder();

  // Accumulates, selects and quantizes. Returns whether all sums were finite. If so, the sent
  // values are subtracted from the residuals, except that WriteBody clears the residuals of tensors
  // sent whole. If not, nothing has changed but the gradients that were to be replaced. If a divided
  // gradient's residual or second moment was not finite before, all have changed as by Rollback.
  bool Run();

  // Reverts Run, for a caller that can't write the payload: residuals that were updated in place up
  // to the rounding of float32, second moments as in TakeBack.
  void Rollback();

  int64_t body_words() const { return body_words_; }  // words of the payload without the fixed header

  // Writes table and codes, and clears the residuals of tensors sent whole.
  void WriteBody(int32_t* body);

 private:
  struct Tensor;
  struct Block;
  struct Strip;

  void AddTensor(const EncoderTensor& tensor);
  const Tensor& TensorOf(const Block& block) const;
  template <typename BlockWork>
  void ForEachBlock(const BlockWork& work) const;
  bool Check(const Block& block, float* divided) const;
  bool SetScales(bool of_divided);
  void Send(Block* block, float* divided) const;
  void AddSent(const Block& block, float scale) const;
  BinKernels Kernels(const Tensor& tensor) const;
  BinRun RunOf(const Tensor& tensor, const Strip& strip, const void* values) const;
  void Layout();
  void WriteBlock(const Block& block, int32_t* body) const;

  const float boost_;
  const ParallelFor parallel_for_;
  const Simd simd_;
  std::vector<Tensor> tensors_;
  std::vector<Block> blocks_;
  std::unique_ptr<float[]> bin_max_;
  int64_t num_bins_ = 0;
  int64_t strip_size_ = 0;  // the largest strip of a tensor with a second moment, in elements
  int64_t body_words_ = 0;
};

}  // namespace gradcomp
