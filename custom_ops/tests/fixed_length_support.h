// Steps of a replica, with a method with payloads of fixed length.
#pragma once

#include "../kernels/fixed_length.h"
#include "check.h"
#include "support.h"

namespace gradcomp {

// Returns a payload from flat float32 tensors; updates the residuals.
inline std::vector<int32_t> EncodeFixed(Method method, const Codecs& codecs, Tensors* residuals,
                                        const Tensors& gradients,
                                        const ParallelFor& parallel_for) {
  std::vector<Source> sources;
  for (size_t i = 0; i < codecs.size(); ++i) {
    sources.push_back({(*residuals)[i].data(), gradients[i].data(), GradientType::kFloat});
  }
  std::vector<int32_t> payload(PayloadWords(codecs));
  EncodeFixedLength(codecs, sources, {method, kFingerprint, kPlan, kStep, 0}, parallel_for,
                    payload.data());
  return payload;
}

// Returns a tensor of each codec's size.
inline Tensors NormalTensors(const Codecs& codecs, float deviation, uint32_t seed) {
  Tensors tensors;
  for (const auto& codec : codecs) tensors.push_back(Normal(codec->size(), deviation, seed++));
  return tensors;
}

// Returns a valid payload of random tensors.
inline std::vector<int32_t> ValidFixed(Method method, const Codecs& codecs) {
  Tensors residuals = NormalTensors(codecs, 1, 7);
  const auto payload =
      EncodeFixed(method, codecs, &residuals, NormalTensors(codecs, 0.3f, 8), Threads(1));
  FixedLengthDecoder decoder(codecs, method, kFingerprint, kPlan, Threads(1));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  return payload;
}

// Reads untrusted words as payloads of one replica, of two replicas, and so on.
inline void DecodeFixed(Method method, const Codecs& codecs, const std::vector<int32_t>& words,
                        int64_t max_replicas) {
  for (int64_t replicas = 1; replicas <= max_replicas; ++replicas) {
    FixedLengthDecoder decoder(codecs, method, kFingerprint, kPlan, Threads(1));
    const int64_t row_words = words.size() / replicas;
    if (!decoder.Read(words.data(), replicas, row_words, kStep).ok()) continue;
    Tensors outputs = NormalTensors(codecs, 1, 1);
    decoder.Reduce(Pointers(&outputs));
    decoder.AddTo(Pointers(&outputs));
  }
}

}  // namespace gradcomp
