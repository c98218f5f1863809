// Fuzz target of AdaComp's decoder. With clang: -fsanitize=fuzzer. With any other compiler, a main
// of its own mutates valid payloads, the same ones every time: fuzz_decoder SECONDS. It writes a
// valid one for libFuzzer to start from: fuzz_decoder seed FILE.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

const std::vector<DecoderTensor> kTensors = {{701, 50}, {1203, 500}, {9, 0}, {0, 50},
                                             {1, 1},    {64, 64},    {40000, 16383}};
constexpr int64_t kMaxReplicas = 3;

// Nobody without a checksum gets past the header: give broken payloads a valid one.
void Reseal(std::vector<int32_t>* words) {
  PayloadHeader header;
  if (static_cast<int64_t>(words->size()) < kHeaderWords) return;
  std::memcpy(static_cast<void*>(&header), words->data(), sizeof header);
  if (header.length < kHeaderWords || header.length > static_cast<int64_t>(words->size())) return;
  WriteHeader(header, words->data());
}

void Decode(const std::vector<int32_t>& words, int64_t num_replicas) {
  AdaCompDecoder decoder(kTensors, kFingerprint, Threads(1));
  if (!decoder.Read(words.data(), words.size(), num_replicas, kStep).ok()) return;
  std::vector<std::vector<float>> outputs = Zeros(kTensors);
  decoder.Reduce(Pointers(&outputs));
  decoder.AddTo(Pointers(&outputs));
}

// A copy that ends where its memory ends, so that the sanitizer sees every word read behind it.
void DecodeAll(const std::vector<int32_t>& words) {
  std::vector<int32_t> exact(words.begin(), words.end());
  exact.shrink_to_fit();
  for (int64_t replicas = 1; replicas <= kMaxReplicas; ++replicas) Decode(exact, replicas);
}

[[maybe_unused]] std::vector<int32_t> ValidPayload(uint32_t seed) {
  std::vector<std::vector<float>> residuals;
  std::vector<std::vector<float>> gradients;
  std::vector<int64_t> bin_sizes;
  for (const DecoderTensor& tensor : kTensors) {
    residuals.push_back(Normal(tensor.size, 1, seed));
    gradients.push_back(Normal(tensor.size, 0.3f, seed + 1));
    bin_sizes.push_back(tensor.bin_size);
  }
  return Encode<float>(&residuals, gradients, bin_sizes);
}

[[maybe_unused]] void Mutate(std::mt19937* engine, std::vector<int32_t>* words) {
  std::mt19937& random = *engine;
  const auto place = [&]() -> int32_t& { return (*words)[random() % words->size()]; };
  for (uint32_t n = 1 + random() % 4; n > 0 && !words->empty(); --n) {
    switch (random() % 8) {
      case 0:
        place() ^= 1u << random() % 32;
        break;
      case 1:
        place() = static_cast<int32_t>(random());
        break;
      case 2:
        place() = 0;
        break;
      case 3:
        place() = -1;
        break;
      case 4:
        (*words)[random() % std::min<size_t>(words->size(), 40)] += 1 - 2 * (random() & 1);
        break;
      case 5:
        words->resize(random() % words->size());
        break;
      case 6:
        words->insert(words->end(), random() % 9, static_cast<int32_t>(random()));
        break;
      default:
        words->insert(words->end(), words->begin(), words->begin() + random() % words->size());
    }
  }
}

}  // namespace
}  // namespace gradcomp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<int32_t> words(size / 4);
  if (!words.empty()) std::memcpy(words.data(), data, 4 * words.size());
  gradcomp::DecodeAll(words);
  gradcomp::Reseal(&words);
  gradcomp::DecodeAll(words);
  return 0;
}

#ifndef GRADCOMP_LIBFUZZER
int main(int argc, char** argv) {
  const std::vector<int32_t> valid = gradcomp::ValidPayload(7);
  if (argc == 3) {
    std::ofstream(argv[2]).write(reinterpret_cast<const char*>(valid.data()), 4 * valid.size());
    return 0;
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(argc > 1 ? std::atof(argv[1]) : 20);
  std::mt19937 engine(1);
  int64_t inputs = 0;
  gradcomp::AdaCompDecoder decoder(gradcomp::kTensors, gradcomp::kFingerprint, gradcomp::Threads(1));
  CHECK(decoder.Read(valid.data(), valid.size(), 1, gradcomp::kStep).ok());
  for (; Clock::now() < end; ++inputs) {
    std::vector<int32_t> words = valid;
    gradcomp::Mutate(&engine, &words);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(words.data()), 4 * words.size());
  }
  std::printf("%lld inputs\n", static_cast<long long>(inputs));
}
#endif
