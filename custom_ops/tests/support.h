// Steps of a replica, for tests and the fuzz target.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/payload.h"
#include "../kernels/source.h"
#include "check.h"

namespace gradcomp {

using Tensors = std::vector<std::vector<float>>;

inline constexpr int64_t kFingerprint = -77;
inline constexpr int64_t kPlan = -99;  // of payloads of a fixed length
inline constexpr int64_t kStep = 5;

// Returns a ParallelFor on `threads` threads, with ranges that depend on their number.
inline ParallelFor Threads(int64_t threads) {
  return [threads](int64_t count, int64_t, const Work& work) {
    if (threads == 1) return work(0, count);
    std::vector<std::thread> running;
    for (int64_t i = 0; i < threads; ++i) {
      const int64_t begin = count * i / threads;
      const int64_t end = count * (i + 1) / threads;
      if (begin < end) running.emplace_back([&work, begin, end] { work(begin, end); });
    }
    for (std::thread& thread : running) thread.join();
  };
}

// Drawn once for all calls: under the sanitizers, drawing takes longer than the tested kernels.
inline const std::vector<float>& Normal(int64_t size, float deviation, uint32_t seed) {
  static std::map<std::tuple<int64_t, float, uint32_t>, std::vector<float>> drawn;
  std::vector<float>& values = drawn[{size, deviation, seed}];
  if (!values.empty()) return values;
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, deviation);
  values.resize(size);
  for (float& value : values) value = normal(engine);
  return values;
}

// The upper bits of floats: bfloat16 numbers, or half precision numbers of other values.
inline std::vector<uint16_t> UpperHalves(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (float value : values) bits.push_back(ToBits(value) >> 16);
  return bits;
}

inline std::vector<BFloat16> BrainFloats(int64_t size, float deviation, uint32_t seed) {
  std::vector<BFloat16> values;
  for (uint16_t bits : UpperHalves(Normal(size, deviation, seed))) values.push_back({bits});
  return values;
}

// Returns half precision numbers of all kinds whose magnitudes have bits below `end`: with 0x7c00,
// all finite numbers.
inline std::vector<Half> Halves(int64_t size, uint32_t seed, uint32_t end = 0x7c00) {
  std::mt19937 engine(seed);
  std::vector<Half> values(size);
  for (Half& value : values) value.bits = engine() % end | (engine() & 0x8000);
  return values;
}

// The residuals and gradients of a replica.
struct Replica {
  Tensors residuals;
  Tensors gradients;
  std::vector<std::vector<uint16_t>> halves;  // the gradients, if their type has two bytes

  Replica(Tensors residuals, Tensors gradients)
      : residuals(std::move(residuals)), gradients(std::move(gradients)) {}

  // Draws tensors of these sizes.
  explicit Replica(const std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      residuals.push_back(Normal(sizes[i], 1, i));
      gradients.push_back(Normal(sizes[i], 0.3f, 100 + i));
    }
  }

  // A gradient of two bytes has the upper bits of the float32 gradient.
  std::vector<Source> Sources(GradientType type = GradientType::kFloat) {
    std::vector<Source> sources;
    halves.clear();
    for (const auto& gradient : gradients) halves.push_back(UpperHalves(gradient));
    for (size_t i = 0; i < residuals.size(); ++i) {
      const void* gradient = halves[i].data();
      if (type == GradientType::kFloat) gradient = gradients[i].data();
      sources.push_back({residuals[i].data(), gradient, type});
    }
    return sources;
  }
};

struct EncodeSettings {
  float scale_factor = 2;
  ParallelFor parallel_for = Threads(1);
  Simd simd = BestSimd();
  GradientType type = GradientType::kFloat;
  AdamSettings adam = {};
};

// Returns the header of a payload of AdaComp's.
inline PayloadHeader HeaderOf(const std::vector<int64_t>& bin_sizes, bool finite,
                              int64_t body_words) {
  PayloadHeader header;
  header.method = static_cast<uint16_t>(Method::kAdaComp);
  header.fingerprint = kFingerprint;
  header.plan = PlanOf(bin_sizes);
  header.step = kStep;
  header.num_tensors = bin_sizes.size();
  header.flags = finite ? 0 : kNonFiniteFlag;
  header.length = kHeaderWords + body_words;
  return header;
}

// Takes a step, and returns its payload.
inline std::vector<int32_t> PayloadOf(const std::vector<EncoderTensor>& tensors,
                                      const EncodeSettings& settings) {
  std::vector<int64_t> bin_sizes;
  for (const EncoderTensor& tensor : tensors) bin_sizes.push_back(tensor.bin_size);
  AdaCompEncoder encoder(tensors, settings.scale_factor, settings.parallel_for, settings.simd);
  const bool finite = encoder.Run();
  const PayloadHeader header = HeaderOf(bin_sizes, finite, encoder.body_words());
  std::vector<int32_t> payload(header.length);
  if (finite) encoder.WriteBody(payload.data() + kHeaderWords);
  WriteHeader(header, payload.data());
  return payload;
}

// Returns a payload from flat tensors; updates the residuals, and the second moments if there are
// any.
template <typename Gradient>
std::vector<int32_t> Encode(Tensors* residuals,
                            const std::vector<std::vector<Gradient>>& gradients,
                            const std::vector<int64_t>& bin_sizes,
                            const EncodeSettings& settings = {},
                            Tensors* moments = nullptr, const Tensors& squares = {}) {
  std::vector<EncoderTensor> tensors;
  for (size_t i = 0; i < residuals->size(); ++i) {
    tensors.push_back({(*residuals)[i].data(), gradients[i].data(), settings.type,
                       static_cast<int64_t>(gradients[i].size()), bin_sizes[i],
                       moments ? (*moments)[i].data() : nullptr,
                       squares.empty() ? nullptr : squares[i].data(), settings.adam});
  }
  return PayloadOf(tensors, settings);
}

inline Tensors Zeros(const std::vector<DecoderTensor>& tensors) {
  Tensors zeros;
  for (const DecoderTensor& tensor : tensors) zeros.emplace_back(tensor.size);
  return zeros;
}

inline std::vector<float*> Pointers(Tensors* values) {
  std::vector<float*> pointers;
  for (std::vector<float>& value : *values) pointers.push_back(value.data());
  return pointers;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

inline void CheckSame(const Tensors& a, const Tensors& b) {
  CHECK(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) CHECK(SameBits(a[i], b[i]));
}

}  // namespace gradcomp
