// Payloads whose length follows from shapes and settings. After the header come the words of each
// tensor, which are all 0 with the non-finite flag. A method provides a codec for each tensor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "blocks.h"
#include "codec.h"
#include "common.h"
#include "payload.h"

namespace gradcomp {

using Codecs = std::vector<std::unique_ptr<const Codec>>;

int64_t PayloadWords(const Codecs& codecs);

// The members of the header, except the length and the flags.
struct Sender {
  Method method;
  int64_t fingerprint;
  int64_t plan;
  int64_t step;
  int64_t replica;
};

// Writes a whole payload of PayloadWords and updates the residuals. If any residual plus gradient
// is not finite, the residuals do not change.
void EncodeFixedLength(const Codecs& codecs, const std::vector<Source>& sources,
                       const Sender& sender, const ParallelFor& parallel_for, int32_t* payload);

// Writes the header before an existing body, which must be zeros if not `finite`.
void WriteFixedHeader(const Codecs& codecs, const Sender& sender, bool finite, int32_t* payload);

class FixedLengthDecoder {
 public:
  // The decoder keeps a reference to the codecs.
  FixedLengthDecoder(const Codecs& codecs, Method method, int64_t fingerprint, int64_t plan,
                     ParallelFor parallel_for);

  // Checks all of `num_payloads` payloads, each at the start of a row of `words`, which must outlive
  // the decoder. Nothing else may be called unless this succeeds.
  Status Read(const int32_t* words, int64_t num_payloads, int64_t row_words,
              std::optional<int64_t> step);

  // Returns whether the values of all replicas were finite.
  bool finite() const;

  // Returns whether Reduce certainly returns true, without computing the sums. False means unknown.
  bool ReducesToFinite() const;

  const std::vector<PayloadView>& payloads() const { return payloads_; }

  // Returns a payload's words of a tensor.
  const int32_t* WordsOf(int64_t payload, int64_t tensor) const {
    return payloads_[payload].body() + first_word_[tensor];
  }

  // Writes to outputs[i] the sum of the payloads' values of tensor i, in the order of the payloads.
  // Returns whether all values and sums were finite; if not, outputs are zeros.
  bool Reduce(const std::vector<float*>& outputs) const;

  // Adds the payloads' values of tensor i to values[i]. A payload with the non-finite flag adds
  // nothing.
  void AddTo(const std::vector<float*>& values) const;

 private:
  Status CheckZeros(const PayloadView& payload) const;
  void AddBlock(int64_t tensor, int64_t block, float* values) const;
  bool ReduceBlock(int64_t tensor, int64_t block, float* output) const;

  const Codecs& codecs_;
  const Method method_;
  const int64_t fingerprint_;
  const int64_t plan_;
  const ParallelFor parallel_for_;
  Blocks blocks_;
  std::vector<int64_t> first_word_;  // of each tensor, after the header
  std::vector<PayloadView> payloads_;
};

}  // namespace gradcomp
