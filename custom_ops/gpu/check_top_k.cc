#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "../kernels/top_k_codec.h"
#include "../kernels/whole_codec.h"
#include "check_support.h"
#include "self_check.h"
#include "top_k_on_gpu.h"

namespace gradcomp {
namespace {

const std::vector<int64_t> kSizes = {9001, 70, 4096, 300};
const std::vector<int64_t> kEntries = {90, 70, 2000, 0};  // 0: sent whole

Codecs NewCodecs() {
  Codecs codecs;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    if (kEntries[i] == 0) {
      codecs.push_back(std::make_unique<WholeCodec>(kSizes[i]));
    } else {
      codecs.push_back(std::make_unique<TopKCodec>(kSizes[i], kEntries[i]));
    }
  }
  return codecs;
}

std::vector<Source> Sources(const std::vector<float*>& residuals,
                            const std::vector<float*>& gradients) {
  std::vector<Source> sources;
  for (size_t i = 0; i < residuals.size(); ++i) {
    sources.push_back({residuals[i], gradients[i], GradientType::kFloat});
  }
  return sources;
}

// Leaves the payload of the CPU.
Status CheckEncode(const Codecs& codecs, bool finite, DriverQueue* queue,
                   std::vector<int32_t>* payload) {
  Tensors residuals = NumbersOf(kSizes, 31);
  Tensors gradients = NumbersOf(kSizes, 32);
  if (!finite) gradients[2][4000] = std::numeric_limits<float>::infinity();
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  const EncodedFixedOnGpu encoded =
      EncodeTopKOnGpu(codecs, Sources(gpu_residuals, Upload(gradients, queue)), queue);
  payload->resize(PayloadWords(codecs));
  EncodeFixedLength(codecs, Sources(Pointers(&residuals), Pointers(&gradients)),
                    {Method::kTopK, 0, 0, 0, 0}, OnThisThread, payload->data());
  std::vector<int32_t> body(payload->size() - kHeaderWords);
  int not_finite = -1;
  queue->Download(encoded.body, 4 * body.size(), body.data());
  queue->Download(encoded.not_finite, sizeof not_finite, &not_finite);
  if (not_finite == finite || !std::equal(body.begin(), body.end(), &(*payload)[kHeaderWords])) {
    return {"top-k's payload is not the CPU's"};
  }
  if (!AreEqual(gpu_residuals, residuals, queue)) return {"top-k's residuals are not the CPU's"};
  return {};
}

Status CheckDecode(const Codecs& codecs, const std::vector<int32_t>& payload, DriverQueue* queue) {
  std::vector<int32_t> rows = payload;
  rows.insert(rows.end(), payload.begin(), payload.end());
  FixedLengthDecoder decoder(codecs, Method::kTopK, 0, 0, OnThisThread);
  const Status read = decoder.Read(rows.data(), 2, payload.size(), std::nullopt);
  if (!read.ok()) return read;
  Tensors values = NumbersOf(kSizes, 33);
  const std::vector<float*> sums = Upload(values, queue);
  const std::vector<float*> added = Upload(values, queue);
  ReduceTopKOnGpu(codecs, decoder, sums, queue);
  AddTopKOnGpu(codecs, decoder, added, queue);
  decoder.AddTo(Pointers(&values));
  if (!AreEqual(added, values, queue)) return {"what top-k puts back is not the CPU's"};
  decoder.Reduce(Pointers(&values));
  if (!AreEqual(sums, values, queue)) return {"top-k's sums are not the CPU's"};
  return {};
}

}  // namespace

Status CheckTopK(DriverQueue* queue) {
  const Codecs codecs = NewCodecs();
  std::vector<int32_t> payload;
  Status status = CheckEncode(codecs, /*finite=*/false, queue, &payload);
  if (status.ok()) status = CheckEncode(codecs, /*finite=*/true, queue, &payload);
  if (status.ok()) status = CheckDecode(codecs, payload, queue);
  return status;
}

}  // namespace gradcomp
