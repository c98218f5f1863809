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

namespace gradcomp {

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
std::vector<int32_t> Encode(std::vector<std::vector<float>>* residuals,
                            const std::vector<std::vector<Gradient>>& gradients,
                            const std::vector<int64_t>& bin_sizes,
                            const EncodeSettings& settings = {},
                            std::vector<std::vector<float>>* moments = nullptr,
                            const std::vector<std::vector<float>>& squares = {}) {
  std::vector<EncoderTensor> tensors;
  for (size_t i = 0; i < residuals->size(); ++i) {
    tensors.push_back({(*residuals)[i].data(), gradients[i].data(), settings.type,
                       static_cast<int64_t>(gradients[i].size()), bin_sizes[i],
                       moments ? (*moments)[i].data() : nullptr,
                       squares.empty() ? nullptr : squares[i].data(), settings.adam});
  }
  return PayloadOf(tensors, settings);
}

inline std::vector<std::vector<float>> Zeros(const std::vector<DecoderTensor>& tensors) {
  std::vector<std::vector<float>> zeros;
  for (const DecoderTensor& tensor : tensors) zeros.emplace_back(tensor.size);
  return zeros;
}

inline std::vector<float*> Pointers(std::vector<std::vector<float>>* values) {
  std::vector<float*> pointers;
  for (std::vector<float>& value : *values) pointers.push_back(value.data());
  return pointers;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

}  // namespace gradcomp
