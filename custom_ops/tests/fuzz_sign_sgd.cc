// Fuzz target of SignSGD's decoder.
#include "../kernels/sign_sgd_codec.h"
#include "fixed_length_support.h"
#include "fuzz.h"

namespace gradcomp {
namespace {

const std::vector<int64_t> kModels[] = {{9, 0, 2100}, {70001, 33}, {1, 64}};  // sizes
constexpr int64_t kMaxReplicas = 3;

Codecs CodecsOf(const std::vector<int64_t>& sizes) {
  Codecs codecs;
  for (int64_t size : sizes) codecs.push_back(std::make_unique<SignSgdCodec>(size));
  return codecs;
}

}  // namespace

void DecodeAll(const std::vector<int32_t>& words) {
  for (const auto& sizes : kModels) {
    DecodeFixed(Method::kSignSgd, CodecsOf(sizes), words, kMaxReplicas);
  }
}

std::vector<std::vector<int32_t>> ValidPayloads() {
  std::vector<std::vector<int32_t>> valid;
  for (const auto& sizes : kModels) valid.push_back(ValidFixed(Method::kSignSgd, CodecsOf(sizes)));
  return valid;
}

}  // namespace gradcomp
