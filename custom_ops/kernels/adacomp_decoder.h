// AdaComp's decoder. Payloads are untrusted: everything in them is checked before it is used.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "adacomp_layout.h"
#include "blocks.h"
#include "common.h"
#include "payload.h"

namespace gradcomp {

struct DecoderTensor {
  int64_t size;  // elements
  int64_t bin_size;
};

class AdaCompDecoder {
 public:
  AdaCompDecoder(const std::vector<DecoderTensor>& tensors, int64_t fingerprint,
                 ParallelFor parallel_for);
  ~AdaCompDecoder();

  // Checks all of `num_payloads` payloads, each at the start of a row of `words`, which must outlive
  // the decoder. Nothing else may be called unless this succeeds.
  Status Read(const int32_t* words, int64_t num_payloads, int64_t row_words,
              std::optional<int64_t> step);

  const std::vector<PayloadView>& payloads() const { return payloads_; }

  // Returns whether the values of all replicas, and their sums so far, are finite.
  bool finite() const { return finite_; }

  // Writes to outputs[i] the sum of the payloads' values of tensor i, in the order of the payloads;
  // zeros if not finite. Returns finite(), which sums of tensors sent whole may still change.
  bool Reduce(const std::vector<float*>& outputs);

  // Adds the payloads' values of tensor i to values[i]. A payload with the non-finite flag adds
  // nothing.
  void AddTo(const std::vector<float*>& values);

  // A payload's codes of a block of a tensor.
  struct Span {
    const uint8_t* codes = nullptr;  // values for a tensor sent whole; null: nothing was sent
    int64_t num_codes = 0;
    float scale = 0;
  };
  Span SpanOf(int64_t payload, int64_t tensor, int64_t block) const;

  const std::vector<Binning>& tensors() const { return tensors_; }

  // Returns what Reduce would return, for callers that reduce on a GPU.
  bool ReducesToFinite() const;

  // Does the work of Reduce for a block of a tensor; `sums` is the beginning of the block. Returns
  // whether the sums are finite.
  bool ReduceBlock(int64_t tensor, int64_t block, float* sums) const;

 private:
  struct Codes;

  const Codes& CodesOf(int64_t payload, int64_t tensor) const;
  Status ReadTable(int64_t payload);
  Status CheckCodes(int64_t payload, int64_t tensor);
  static Status ReadBlockLengths(const Binning& bins, Codes* codes);
  template <typename Code>
  static Status CheckBlock(const Binning& bins, int64_t block, const Codes& codes);
  // Adds a block's codes to `values`, the beginning of the block.
  void AddBlock(const Codes& codes, const Binning& bins, int64_t block, float* values) const;
  bool ScalesAreFinite() const;

  const int64_t fingerprint_;
  int64_t plan_;
  const ParallelFor parallel_for_;
  std::vector<Binning> tensors_;
  Blocks blocks_;
  std::vector<PayloadView> payloads_;
  std::vector<Codes> codes_;  // by payload, then tensor
  bool finite_ = false;
};

}  // namespace gradcomp
