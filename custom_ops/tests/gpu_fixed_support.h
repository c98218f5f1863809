// Compares the GPU kernels of methods with payloads of fixed length, in the emulator, with the CPU
// kernels. Include this file after the kernels.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "../gpu/fixed_on_gpu.h"
#include "check.h"
#include "emulated_queue.h"
#include "fixed_length_support.h"

namespace gradcomp {

struct FixedMethod {
  Method method;
  EmulatedKernels kernels;
  EncodeOnGpu* encode;
  DecodeOnGpu* decode;
};

// Checks that payloads and residuals equal the CPU's, in orders of threads and blocks that depend
// on the seed.
inline void CheckEncodes(const FixedMethod& method, const Codecs& codecs, const Tensors& residuals,
                         const Tensors& gradients, GradientType type = GradientType::kFloat,
                         const std::vector<unsigned>& seeds = {1, 50}) {
  const Sender sender = {method.method, kFingerprint, kPlan, kStep, /*replica=*/3};
  Replica expected(residuals, gradients);
  std::vector<int32_t> payload(PayloadWords(codecs));
  EncodeFixedLength(codecs, expected.Sources(type), sender, Threads(1), payload.data());
  std::vector<PayloadView> views;
  CHECK(ReadRows(payload.data(), 1, payload.size(), &views).ok());
  const PayloadView& view = views[0];
  for (unsigned seed : seeds) {
    Replica replica(residuals, gradients);
    EmulatedQueue queue(method.kernels, seed);
    const EncodedFixedOnGpu encoded = method.encode(codecs, replica.Sources(type), sender, &queue);
    CHECK(*encoded.not_finite == view.header.non_finite());
    CHECK(std::equal(encoded.body, encoded.body + view.body_words(), view.body()));
    CheckSame(replica.residuals, expected.residuals);
  }
}

inline void CheckEncodesAllTypes(const FixedMethod& method, const Codecs& codecs) {
  uint32_t seed = 0;
  for (const auto type : {GradientType::kFloat, GradientType::kHalf, GradientType::kBFloat16}) {
    seed += 100;
    CheckEncodes(method, codecs, NormalTensors(codecs, 1, seed),
                 NormalTensors(codecs, 0.3f, seed + 50), type);
  }
}

inline void CheckANonFiniteSumLeavesEverything(const FixedMethod& method, const Codecs& codecs,
                                               const std::vector<size_t>& bad) {
  for (size_t tensor : bad) {
    for (float value : {std::nanf(""), -std::nanf(""), std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity()}) {
      Tensors gradients = NormalTensors(codecs, 0.3f, 20);
      gradients[tensor].back() = value;
      CheckEncodes(method, codecs, NormalTensors(codecs, 1, 1), gradients, GradientType::kFloat, {1});
    }
  }
}

inline std::vector<int32_t> PayloadsOf(const FixedMethod& method, const Codecs& codecs,
                                       int64_t num_payloads, float largest = 1) {
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < num_payloads; ++i) {
    Tensors residuals = NormalTensors(codecs, 1, 100 * i);
    residuals[0][5] = largest;
    const auto payload = EncodeFixed(method.method, codecs, &residuals,
                                     NormalTensors(codecs, 0.3f, 100 * i + 50), Threads(1));
    rows.insert(rows.end(), payload.begin(), payload.end());
  }
  return rows;
}

inline void CheckDecodes(const FixedMethod& method, const Codecs& codecs,
                         const std::vector<int64_t>& numbers = {1, 3}) {
  for (int64_t num_payloads : numbers) {
    const std::vector<int32_t> rows = PayloadsOf(method, codecs, num_payloads);
    FixedLengthDecoder decoder(codecs, method.method, kFingerprint, kPlan, Threads(1));
    CHECK(decoder.Read(rows.data(), num_payloads, rows.size() / num_payloads, kStep).ok());
    CHECK(decoder.ReducesToFinite());
    Tensors sums = NormalTensors(codecs, 1, 7);
    Tensors added = sums;
    Tensors gpu_sums = sums;
    Tensors gpu_added = sums;
    CHECK(decoder.Reduce(Pointers(&sums)));
    decoder.AddTo(Pointers(&added));
    EmulatedQueue queue(method.kernels, 3);
    method.decode(codecs, decoder, Pointers(&gpu_sums), /*adds=*/false, &queue);
    method.decode(codecs, decoder, Pointers(&gpu_added), /*adds=*/true, &queue);
    for (size_t i = 0; i < sums.size(); ++i) {
      CHECK(SameBits(gpu_sums[i], sums[i]));
      CHECK(SameBits(gpu_added[i], added[i]));
    }
  }
}

// Checks that the zeros of a non-finite payload are not added, which would change the sign of
// zeros.
inline void CheckANonFinitePayloadPutsNothingBack(const FixedMethod& method, const Codecs& codecs) {
  Tensors gradients = NormalTensors(codecs, 1, 1);
  gradients[0][0] = std::nanf("");
  Tensors before;
  for (const auto& codec : codecs) before.emplace_back(codec->size(), -0.0f);
  Tensors values = before;
  const auto payload = EncodeFixed(method.method, codecs, &values, gradients, Threads(1));
  FixedLengthDecoder decoder(codecs, method.method, kFingerprint, kPlan, Threads(1));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  EmulatedQueue queue(method.kernels, 1);
  method.decode(codecs, decoder, Pointers(&values), /*adds=*/true, &queue);
  for (size_t i = 0; i < before.size(); ++i) CHECK(SameBits(values[i], before[i]));
}

// Checks payloads whose magnitudes may add up to infinity.
inline void CheckMayOverflow(const FixedMethod& method, const Codecs& codecs, int64_t num_payloads,
                             float largest) {
  const std::vector<int32_t> rows = PayloadsOf(method, codecs, num_payloads, largest);
  FixedLengthDecoder decoder(codecs, method.method, kFingerprint, kPlan, Threads(1));
  CHECK(decoder.Read(rows.data(), num_payloads, rows.size() / num_payloads, kStep).ok());
  CHECK(!decoder.ReducesToFinite());
}

inline void CheckOfNoElementsThereIsNothingToDo(const FixedMethod& method, const Codecs& codecs) {
  Replica replica({{}}, {{}});
  EmulatedQueue queue(method.kernels, 1);
  const Sender sender = {method.method, kFingerprint, kPlan, kStep, 0};
  const auto encoded = method.encode(codecs, replica.Sources(), sender, &queue);
  CHECK(encoded.body == nullptr && encoded.not_finite == nullptr);
}

}  // namespace gradcomp
