// Fuzz target of AdaComp's decoder.
#include "fuzz.h"

namespace gradcomp {
namespace {

using Model = std::vector<DecoderTensor>;

// Some models end with codes and one ends with values, so that reads beyond them are out of bounds.
// Tensors of several blocks come first, where mutations often hit the lengths.
const Model kModels[] = {{{9, 0}, {1203, 500}, {0, 50}, {1, 1}, {40000, 16383}, {701, 50}},
                         {{64, 64}, {701, 50}, {9, 0}},
                         {{140000, 16383}, {70, 50}},
                         {{140000, 63}}};
constexpr int64_t kMaxReplicas = 3;

void Decode(const Model& tensors, const std::vector<int32_t>& words, int64_t num_replicas) {
  AdaCompDecoder decoder(tensors, kFingerprint, Threads(1));
  const int64_t row_words = words.size() / num_replicas;
  if (!decoder.Read(words.data(), num_replicas, row_words, kStep).ok()) return;
  Tensors outputs = Zeros(tensors);
  decoder.Reduce(Pointers(&outputs));
  decoder.AddTo(Pointers(&outputs));
}

std::vector<int32_t> ValidPayload(const Model& tensors) {
  Tensors residuals;
  Tensors gradients;
  std::vector<int64_t> bin_sizes;
  for (const DecoderTensor& tensor : tensors) {
    residuals.push_back(Normal(tensor.size, 1, 7));
    gradients.push_back(Normal(tensor.size, 0.3f, 8));
    bin_sizes.push_back(tensor.bin_size);
  }
  return Encode<float>(&residuals, gradients, bin_sizes);
}

}  // namespace

void DecodeAll(const std::vector<int32_t>& words) {
  for (const Model& tensors : kModels) {
    for (int64_t replicas = 1; replicas <= kMaxReplicas; ++replicas) {
      Decode(tensors, words, replicas);
    }
  }
}

std::vector<std::vector<int32_t>> ValidPayloads() {
  std::vector<std::vector<int32_t>> valid;
  for (const Model& tensors : kModels) {
    valid.push_back(ValidPayload(tensors));
    AdaCompDecoder decoder(tensors, kFingerprint, Threads(1));
    CHECK(decoder.Read(valid.back().data(), 1, valid.back().size(), kStep).ok());
  }
  return valid;
}

}  // namespace gradcomp
