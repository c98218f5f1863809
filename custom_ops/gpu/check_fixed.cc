// The checks of the methods whose payloads have a fixed length: TopK, QSGD and SignSGD.
#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "../kernels/qsgd_codec.h"
#include "../kernels/sign_sgd_codec.h"
#include "../kernels/top_k_codec.h"
#include "../kernels/whole_codec.h"
#include "check_support.h"
#include "fixed_on_gpu.h"
#include "qsgd_on_gpu.h"
#include "sign_sgd_on_gpu.h"
#include "top_k_on_gpu.h"

namespace gradcomp {
namespace {

struct CheckedMethod {
  const char* name;
  Method method;
  EncodeOnGpu* encode;
  DecodeOnGpu* decode;
};

std::vector<int64_t> SizesOf(const Codecs& codecs) {
  std::vector<int64_t> sizes;
  for (const auto& codec : codecs) sizes.push_back(codec->size());
  return sizes;
}

// Returns the CPU's payload in `payload`.
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
  queue->Download(encoded.body, 4 * body.size(), body.data());
  const bool found_finite = !Downloaded(encoded.not_finite, queue);
  if (found_finite != finite || !std::equal(body.begin(), body.end(), &(*payload)[kHeaderWords])) {
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

// Checks payloads, residuals and sums, and the detection of non-finite values.
Status CheckFixed(const CheckedMethod& method, const Codecs& codecs, DriverQueue* queue) {
  std::vector<int32_t> payload;
  Status status = CheckEncode(method, codecs, /*finite=*/false, queue, &payload);
  if (status.ok()) status = CheckEncode(method, codecs, /*finite=*/true, queue, &payload);
  if (status.ok()) status = CheckDecode(method, codecs, payload, queue);
  return status;
}

Status CheckTopK(DriverQueue* queue) {
  Codecs codecs;
  codecs.push_back(std::make_unique<TopKCodec>(9001, 90));
  codecs.push_back(std::make_unique<TopKCodec>(70, 70));
  codecs.push_back(std::make_unique<WholeCodec>(300));
  codecs.push_back(std::make_unique<TopKCodec>(4096, 2000));
  return CheckFixed({"top-k", Method::kTopK, EncodeTopKOnGpu, DecodeTopKOnGpu}, codecs, queue);
}

// Checks buckets that warps measure, and buckets that blocks measure.
Status CheckQsgd(DriverQueue* queue) {
  for (int64_t bucket_size : {96, 8192}) {
    Codecs codecs;
    codecs.push_back(std::make_unique<WholeCodec>(300));
    for (int bits = kMinQsgdBits; bits <= kMaxQsgdBits; ++bits) {
      const QsgdSettings settings = {bits, bucket_size};
      codecs.push_back(std::make_unique<QsgdCodec>(bits == 4 ? 9001 : 1000 + bits, settings));
    }
    const Status status =
        CheckFixed({"QSGD", Method::kQsgd, EncodeQsgdOnGpu, DecodeQsgdOnGpu}, codecs, queue);
    if (!status.ok()) return status;
  }
  return {};
}

// Checks some tensors of more than one block.
Status CheckSignSgd(DriverQueue* queue) {
  Codecs codecs;
  for (int64_t size : {70, 70001, 9001}) codecs.push_back(std::make_unique<SignSgdCodec>(size));
  return CheckFixed({"SignSGD", Method::kSignSgd, EncodeSignSgdOnGpu, DecodeSignSgdOnGpu}, codecs,
                    queue);
}

}  // namespace

Status CheckFixedLength(DriverQueue* queue) {
  for (const auto check : {CheckTopK, CheckQsgd, CheckSignSgd}) {
    const Status status = check(queue);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace gradcomp
