// Fuzz target of QSGD's decoder.
#include "../kernels/qsgd_codec.h"
#include "../kernels/whole_codec.h"
#include "fixed_length_support.h"
#include "fuzz.h"

namespace gradcomp {
namespace {

struct QsgdTensor {
  int64_t size;
  int bits;  // 0: sent whole
  int64_t bucket_size;
};

// Each model ends with another kind of data, so that reads beyond it are out of bounds.
const std::vector<QsgdTensor> kModels[] = {{{9, 0, 32}, {0, 4, 32}, {2100, 4, 1024}},
                                           {{70001, 3, 65536}, {33, 7, 32}},
                                           {{1, 2, 32}, {64, 8, 32}, {5, 0, 32}}};
constexpr int64_t kMaxReplicas = 3;

Codecs CodecsOf(const std::vector<QsgdTensor>& tensors) {
  Codecs codecs;
  for (const QsgdTensor& tensor : tensors) {
    if (tensor.bits == 0) {
      codecs.push_back(std::make_unique<WholeCodec>(tensor.size));
    } else {
      const QsgdSettings settings = {tensor.bits, tensor.bucket_size};
      codecs.push_back(std::make_unique<QsgdCodec>(tensor.size, settings));
    }
  }
  return codecs;
}

}  // namespace

void DecodeAll(const std::vector<int32_t>& words) {
  for (const auto& tensors : kModels) {
    DecodeFixed(Method::kQsgd, CodecsOf(tensors), words, kMaxReplicas);
  }
}

std::vector<std::vector<int32_t>> ValidPayloads() {
  std::vector<std::vector<int32_t>> valid;
  for (const auto& tensors : kModels) valid.push_back(ValidFixed(Method::kQsgd, CodecsOf(tensors)));
  return valid;
}

}  // namespace gradcomp
