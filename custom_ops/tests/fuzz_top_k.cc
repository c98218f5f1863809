// Fuzz target of TopK's decoder.
#include "../kernels/top_k_codec.h"
#include "../kernels/whole_codec.h"
#include "fixed_length_support.h"
#include "fuzz.h"

namespace gradcomp {
namespace {

struct TopKTensor {
  int64_t size;
  int64_t entries;  // 0: sent whole
};

// Each model ends with another kind of data, so that reads beyond it are out of bounds.
const std::vector<TopKTensor> kModels[] = {{{9, 0}, {0, 0}, {200001, 20}, {30, 3}},
                                           {{30, 3}, {9, 0}},
                                           {{5, 5}, {1, 1}}};
constexpr int64_t kMaxReplicas = 3;

Codecs CodecsOf(const std::vector<TopKTensor>& tensors) {
  Codecs codecs;
  for (const TopKTensor& tensor : tensors) {
    if (tensor.entries == 0) {
      codecs.push_back(std::make_unique<WholeCodec>(tensor.size));
    } else {
      codecs.push_back(std::make_unique<TopKCodec>(tensor.size, tensor.entries));
    }
  }
  return codecs;
}

void Decode(const std::vector<TopKTensor>& tensors, const std::vector<int32_t>& words,
            int64_t num_replicas) {
  const Codecs codecs = CodecsOf(tensors);
  FixedLengthDecoder decoder(codecs, Method::kTopK, kFingerprint, kPlan, Threads(1));
  const int64_t row_words = words.size() / num_replicas;
  if (!decoder.Read(words.data(), num_replicas, row_words, kStep).ok()) return;
  Tensors outputs = NormalTensors(codecs, 1, 1);
  decoder.Reduce(Pointers(&outputs));
  decoder.AddTo(Pointers(&outputs));
  for (size_t i = 0; i < tensors.size() && decoder.finite(); ++i) {
    if (tensors[i].entries == 0) continue;
    static_cast<const TopKCodec&>(*codecs[i]).ClearSent(decoder.WordsOf(0, i), outputs[i].data());
  }
}

}  // namespace

void DecodeAll(const std::vector<int32_t>& words) {
  for (const auto& tensors : kModels) {
    for (int64_t replicas = 1; replicas <= kMaxReplicas; ++replicas) {
      Decode(tensors, words, replicas);
    }
  }
}

std::vector<std::vector<int32_t>> ValidPayloads() {
  std::vector<std::vector<int32_t>> valid;
  for (const auto& tensors : kModels) valid.push_back(ValidFixed(Method::kTopK, CodecsOf(tensors)));
  return valid;
}

}  // namespace gradcomp
