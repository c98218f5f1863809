// The checks of AdaComp's kernels and of Adam's division.
#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/payload.h"
#include "../kernels/precondition.h"
#include "adacomp_on_gpu.h"
#include "check_support.h"
#include "precondition_on_gpu.h"

namespace gradcomp {
namespace {

constexpr AdamSettings kAdam{0.999f, 1e-7f, 10.0f};

Tensors Squared(Tensors tensors) {
  for (auto& tensor : tensors) {
    for (float& value : tensor) value *= value;
  }
  return tensors;
}

// Large and small bins, short last bins, two blocks, and a tensor that is sent whole.
const std::vector<int64_t> kAdaCompSizes = {70001, 5003, 70, 6000, 777, 3000};
const std::vector<int64_t> kBinSizes = {50, 500, 7, 5000, 0, 3};

Tensors Numbers(uint32_t seed) { return NumbersOf(kAdaCompSizes, seed); }

std::vector<EncoderTensor> Encoded(const std::vector<float*>& residuals,
                                   const std::vector<float*>& gradients,
                                   const std::vector<float*>& moments) {
  std::vector<EncoderTensor> tensors;
  for (size_t i = 0; i < residuals.size(); ++i) {
    tensors.push_back({residuals[i], gradients[i], GradientType::kFloat, kAdaCompSizes[i],
                       kBinSizes[i], moments.empty() ? nullptr : moments[i], nullptr, kAdam});
  }
  return tensors;
}

// Takes a step on both devices. Returns the CPU's payload in `payload`.
Status CheckEncode(bool divides, DriverQueue* queue, std::vector<int32_t>* payload) {
  Tensors residuals = Numbers(1);
  Tensors gradients = Numbers(2);
  Tensors moments = divides ? Squared(Numbers(3)) : Tensors();
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  const std::vector<float*> gpu_moments = Upload(moments, queue);
  const EncodedOnGpu on_gpu = EncodeAdaComp(
      Encoded(gpu_residuals, Upload(gradients, queue), gpu_moments), 2, queue);
  const gpu::EncodeSummary summary = Downloaded(on_gpu.summary, queue);

  AdaCompEncoder encoder(Encoded(Pointers(&residuals), Pointers(&gradients), Pointers(&moments)),
                         2, OnThisThread);
  if (!encoder.Run()) return {"the check itself is not finite"};
  payload->assign(kHeaderWords + encoder.body_words(), 0);
  encoder.WriteBody(payload->data() + kHeaderWords);
  std::vector<int32_t> body(encoder.body_words());
  const bool fits = summary.finite && summary.body_words == encoder.body_words();
  if (fits) queue->Download(on_gpu.body, 4 * body.size(), body.data());
  if (!queue->status().ok()) return queue->status();
  // Sums of quotients are rounded, so the order of additions may change the last bit of the scales.
  const auto is_same = [&](int32_t a, int32_t b, size_t word) {
    const bool is_scale = word < 2 * kAdaCompSizes.size() && word % 2 == 0;
    return divides && is_scale ? std::max(a, b) - std::min(a, b) <= 1 : a == b;
  };
  for (size_t i = 0; i < body.size(); ++i) {
    if (!fits || !is_same(body[i], (*payload)[kHeaderWords + i], i)) {
      return {"the encoder's payload is not the CPU's"};
    }
  }
  if (!divides && !AreEqual(gpu_residuals, residuals, queue)) {
    return {"the encoder's residuals are not the CPU's"};
  }
  if (divides && !AreEqual(gpu_moments, moments, queue)) {
    return {"the encoder's second moments are not the CPU's"};
  }
  return queue->status();
}

Status CheckNotFinite(DriverQueue* queue) {
  const Tensors residuals = Numbers(1);
  Tensors gradients = Numbers(2);
  gradients[1][4000] = std::numeric_limits<float>::infinity();
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  const EncodedOnGpu on_gpu =
      EncodeAdaComp(Encoded(gpu_residuals, Upload(gradients, queue), {}), 2, queue);
  const gpu::EncodeSummary summary = Downloaded(on_gpu.summary, queue);
  // These sums and differences are exact.
  const bool given_back = AreEqual(gpu_residuals, residuals, queue);
  if (!queue->status().ok()) return queue->status();
  if (summary.finite || summary.body_words != 0 || !given_back) {
    return {"the encoder does not give back a step that is not finite"};
  }
  return {};
}

// Checks the case without memory for a payload.
Status CheckTakeBack(DriverQueue* queue) {
  Tensors residuals = Numbers(1);
  Tensors gradients = Numbers(2);
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  TakeBackAdaComp(
      EncodeAdaComp(Encoded(gpu_residuals, Upload(gradients, queue), {}), 2, queue), queue);
  AdaCompEncoder encoder(Encoded(Pointers(&residuals), Pointers(&gradients), {}), 2, OnThisThread);
  encoder.Run();
  encoder.Rollback();
  if (AreEqual(gpu_residuals, residuals, queue)) return {};
  return {"the encoder does not take back a payload as the CPU's does"};
}

Status CheckDecode(std::vector<int32_t> payload, DriverQueue* queue) {
  PayloadHeader header;
  header.method = static_cast<uint16_t>(Method::kAdaComp);
  header.plan = PlanOf(kBinSizes);
  header.num_tensors = kAdaCompSizes.size();
  header.length = payload.size();
  WriteHeader(header, payload.data());
  constexpr int64_t kReplicas = 2;
  std::vector<int32_t> rows = payload;
  rows.insert(rows.end(), payload.begin(), payload.end());
  std::vector<DecoderTensor> tensors;
  for (size_t i = 0; i < kAdaCompSizes.size(); ++i) {
    tensors.push_back({kAdaCompSizes[i], kBinSizes[i]});
  }
  AdaCompDecoder decoder(tensors, 0, OnThisThread);
  const Status read = decoder.Read(rows.data(), kReplicas, payload.size(), std::nullopt);
  if (!read.ok()) return read;

  Tensors values = Numbers(5);
  const std::vector<float*> sums = Upload(values, queue);
  const std::vector<float*> added = Upload(values, queue);
  DecodeAdaComp(decoder, sums, /*adds=*/false, queue);
  DecodeAdaComp(decoder, added, /*adds=*/true, queue);
  decoder.AddTo(Pointers(&values));
  if (!AreEqual(added, values, queue)) return {"values restored by the decoder differ from the CPU's"};
  decoder.Reduce(Pointers(&values));
  if (!AreEqual(sums, values, queue)) return {"the decoder's sums are not the CPU's"};
  return queue->status();
}

const std::vector<int64_t> kPreconditionSizes = {9001, 70, 4096};

// If squares are given, they belong to the first tensor.
std::vector<PreconditionTensor> Divided(const std::vector<float*>& moments,
                                        const std::vector<float*>& gradients,
                                        const std::vector<float*>& squares,
                                        const std::vector<float*>& outputs) {
  std::vector<PreconditionTensor> tensors;
  for (size_t i = 0; i < kPreconditionSizes.size(); ++i) {
    tensors.push_back({moments[i], gradients[i], GradientType::kFloat, kPreconditionSizes[i],
                       outputs[i], i == 0 ? squares[i] : nullptr, kAdam});
  }
  return tensors;
}

Status CheckDivision(bool finite, DriverQueue* queue) {
  Tensors moments = Squared(NumbersOf(kPreconditionSizes, 11));
  Tensors gradients = NumbersOf(kPreconditionSizes, 12);
  Tensors squares = Squared(NumbersOf(kPreconditionSizes, 13));
  Tensors outputs = NumbersOf(kPreconditionSizes, 14);
  if (!finite) gradients[2][4000] = std::numeric_limits<float>::infinity();
  const std::vector<float*> gpu_moments = Upload(moments, queue);
  const std::vector<float*> gpu_outputs = Upload(outputs, queue);
  PreconditionOnGpu(Divided(gpu_moments, Upload(gradients, queue), Upload(squares, queue),
                            gpu_outputs),
                    queue);
  Precondition(Divided(Pointers(&moments), Pointers(&gradients), Pointers(&squares),
                       Pointers(&outputs)),
               OnThisThread);
  if (!AreEqual(gpu_moments, moments, queue)) return {"second moments are not the CPU's"};
  if (!AreEqual(gpu_outputs, outputs, queue)) return {"divided gradients are not the CPU's"};
  return {};
}

}  // namespace

Status CheckAdaComp(DriverQueue* queue) {
  std::vector<int32_t> payload;
  Status status = CheckEncode(/*divides=*/true, queue, &payload);
  if (status.ok()) status = CheckEncode(/*divides=*/false, queue, &payload);
  if (status.ok()) status = CheckNotFinite(queue);
  if (status.ok()) status = CheckTakeBack(queue);
  if (status.ok()) status = CheckDecode(payload, queue);
  return status;
}

Status CheckPrecondition(DriverQueue* queue) {
  const Status status = CheckDivision(/*finite=*/true, queue);
  return status.ok() ? CheckDivision(/*finite=*/false, queue) : status;
}

}  // namespace gradcomp
