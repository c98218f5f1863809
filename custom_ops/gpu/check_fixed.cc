#include "check_fixed.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "check_support.h"

namespace gradcomp {
namespace {

std::vector<int64_t> SizesOf(const Codecs& codecs) {
  std::vector<int64_t> sizes;
  for (const auto& codec : codecs) sizes.push_back(codec->size());
  return sizes;
}

// Leaves the payload of the CPU.
Status CheckEncode(const CheckedMethod& method, const Codecs& codecs, bool finite,
                   DriverQueue* queue, std::vector<int32_t>* payload) {
  const Sender sender = {method.method, 0, 0, 5, 6};
  Tensors residuals = NumbersOf(SizesOf(codecs), 31);
  Tensors gradients = NumbersOf(SizesOf(codecs), 32);
  if (!finite) gradients.back().back() = std::numeric_limits<float>::infinity();
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  const EncodedFixedOnGpu encoded =
      method.encode(codecs, Sources(gpu_residuals, Upload(gradients, queue)), sender, queue);
  payload->resize(PayloadWords(codecs));
  EncodeFixedLength(codecs, Sources(Pointers(&residuals), Pointers(&gradients)), sender,
                    OnThisThread, payload->data());
  std::vector<int32_t> body(payload->size() - kHeaderWords);
  int not_finite = -1;
  queue->Download(encoded.body, 4 * body.size(), body.data());
  queue->Download(encoded.not_finite, sizeof not_finite, &not_finite);
  if (not_finite == finite || !std::equal(body.begin(), body.end(), &(*payload)[kHeaderWords])) {
    return {Concat(method.name, "'s payload is not the CPU's")};
  }
  if (!AreEqual(gpu_residuals, residuals, queue)) {
    return {Concat(method.name, "'s residuals are not the CPU's")};
  }
  return {};
}

Status CheckDecode(const CheckedMethod& method, const Codecs& codecs,
                   const std::vector<int32_t>& payload, DriverQueue* queue) {
  std::vector<int32_t> rows = payload;
  rows.insert(rows.end(), payload.begin(), payload.end());
  FixedLengthDecoder decoder(codecs, method.method, 0, 0, OnThisThread);
  const Status read = decoder.Read(rows.data(), 2, payload.size(), std::nullopt);
  if (!read.ok()) return read;
  Tensors values = NumbersOf(SizesOf(codecs), 33);
  const std::vector<float*> sums = Upload(values, queue);
  const std::vector<float*> added = Upload(values, queue);
  method.decode(codecs, decoder, sums, /*adds=*/false, queue);
  method.decode(codecs, decoder, added, /*adds=*/true, queue);
  decoder.AddTo(Pointers(&values));
  if (!AreEqual(added, values, queue)) {
    return {Concat("what ", method.name, " puts back is not the CPU's")};
  }
  decoder.Reduce(Pointers(&values));
  if (!AreEqual(sums, values, queue)) return {Concat(method.name, "'s sums are not the CPU's")};
  return {};
}

}  // namespace

Status CheckFixed(const CheckedMethod& method, const Codecs& codecs, DriverQueue* queue) {
  std::vector<int32_t> payload;
  Status status = CheckEncode(method, codecs, /*finite=*/false, queue, &payload);
  if (status.ok()) status = CheckEncode(method, codecs, /*finite=*/true, queue, &payload);
  if (status.ok()) status = CheckDecode(method, codecs, payload, queue);
  return status;
}

}  // namespace gradcomp
