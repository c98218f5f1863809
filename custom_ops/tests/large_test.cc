// Tests tensors of more than 2^31 elements, in sparsely mapped memory. Pages that are only read
// cost nothing, and the encoder does not write bins that stay zero.
#include <sys/mman.h>
#include <sys/resource.h>

#include <cmath>
#include <set>

#include "../kernels/power_sgd.h"
#include "../kernels/top_k_codec.h"
#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

constexpr int64_t kSize = (int64_t{1} << 31) + 12345;
const std::vector<int64_t> kSent = {3, (int64_t{1} << 31) - 1, int64_t{1} << 31, kSize - 1};

float* MapZeros(int64_t size) {
  void* memory = mmap(nullptr, size * sizeof(float), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  madvise(memory, size * sizeof(float), MADV_HUGEPAGE);  // fewer page faults, where available
  return static_cast<float*>(memory);
}

void LargeTensor(int64_t bin_size) {
  float* residual = MapZeros(kSize);
  float* gradient = MapZeros(kSize);
  for (int64_t i : kSent) gradient[i] = i % 2 == 0 ? 1.0f : -1.0f;
  AdaCompEncoder encoder({{residual, gradient, GradientType::kFloat, kSize, bin_size}}, 2,
                         Threads(2));
  CHECK(encoder.Run());
  const PayloadHeader header = HeaderOf({bin_size}, /*finite=*/true, encoder.body_words());
  std::vector<int32_t> payload(header.length);
  encoder.WriteBody(payload.data() + kHeaderWords);
  WriteHeader(header, payload.data());

  std::set<int64_t> bins_sent;
  for (int64_t i : kSent) bins_sent.insert(i / bin_size);
  const int64_t num_bins = CeilDiv(kSize, bin_size);
  const float scale = static_cast<float>(bins_sent.size() / static_cast<double>(num_bins));
  for (int64_t i : kSent) CHECK(residual[i] == gradient[i] - gradient[i] * scale);

  // Decodes only blocks with sent elements, because decoding all blocks would fill all pages.
  AdaCompDecoder decoder({{kSize, bin_size}}, kFingerprint, Threads(2));
  CHECK(decoder.Read(payload.data(), 1, payload.size(), kStep).ok());
  float* output = MapZeros(kSize);
  const Binning bins(kSize, bin_size);
  for (int64_t i : kSent) {
    const int64_t block = i / (bins.bins_per_block * bin_size);
    CHECK(decoder.ReduceBlock(0, block, output + bins.FirstElement(block)));
    CHECK(output[i] == gradient[i] * scale);
  }
  decoder.AddTo({residual});
  for (int64_t i : kSent) CHECK(std::fabs(residual[i] - gradient[i]) < 1e-6f);
  for (float* memory : {residual, gradient, output}) munmap(memory, kSize * sizeof(float));
}

// Tests all functions except those that write residuals or reduced gradients, which would fill all
// pages.
void FactorsOfMoreThan2To31Elements() {
  constexpr int64_t kRows = (int64_t{1} << 20) + 1;
  constexpr int64_t kColumns = 2049;
  constexpr int64_t kElements = kRows * kColumns;
  static_assert(kElements > int64_t{1} << 31);
  float* residual = MapZeros(kElements);
  float* gradient = MapZeros(kElements);
  gradient[1] = 3;
  gradient[kElements - 1] = 4;
  const PowerSgd method({{residual, gradient, GradientType::kFloat, kRows, kColumns, 1, 1}},
                        Threads(2));
  const std::vector<float> factor(kColumns, 1.0f);
  std::vector<float> left(method.left_size());
  std::vector<float> right(method.right_size());
  CHECK(method.ComputeLeft(method.Start({factor.data()}, 0), left.data()));
  CHECK(left[1] == 3 && left[kRows] == 4);
  CHECK(method.Orthonormalize(left.data()));
  CHECK(std::fabs(left[1] - 0.6f) < 1e-6f && std::fabs(left[kRows] - 0.8f) < 1e-6f);
  method.ComputeRight(left.data(), right.data());
  for (int64_t i = 0; i < kColumns; ++i) {
    const float expected = i == 1 ? 1.8f : i == kColumns - 1 ? 3.2f : 0;
    CHECK(std::fabs(right[i] - expected) < 1e-6f);
  }
  for (float* memory : {residual, gradient}) munmap(memory, kElements * sizeof(float));
}

void TensorsOfMoreThan2To31ElementsIn16BitCodes() { LargeTensor(16383); }
void TensorsOfMoreThan2To31ElementsIn8BitCodes() { LargeTensor(63); }

void TensorsOfMoreThan2To31ElementsByTopK() {
  float* residual = MapZeros(kSize);
  float* gradient = MapZeros(kSize);
  float* output = MapZeros(kSize);
  for (int64_t i : kSent) gradient[i] = i % 2 == 0 ? 1.0f : -1.0f;
  const int64_t entries = kSent.size();
  const TopKCodec codec(kSize, entries);
  std::vector<int32_t> words(codec.words());
  const auto encoder = codec.NewEncoder({residual, gradient, GradientType::kFloat}, {}, words.data());
  for (int pass = 0; pass < encoder->num_passes(); ++pass) {
    for (int64_t block = 0; block < codec.num_blocks(); ++block) encoder->RunBlock(pass, block);
    encoder->EndPass(pass);
  }
  CHECK(codec.Check(words.data()).ok());
  for (int64_t i = 0; i < entries; ++i) CHECK(static_cast<uint32_t>(words[i]) == kSent[i]);
  for (int64_t block = 0; block < codec.num_blocks(); ++block) {
    codec.AddBlock(words.data(), block, output);
  }
  for (int64_t i : kSent) CHECK(residual[i] == 0 && output[i] == gradient[i]);
  codec.ClearSent(words.data(), output);
  for (int64_t i : kSent) CHECK(output[i] == 0);
  for (float* memory : {residual, gradient, output}) munmap(memory, kSize * sizeof(float));
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(TensorsOfMoreThan2To31ElementsIn16BitCodes);
  RUN(TensorsOfMoreThan2To31ElementsIn8BitCodes);
  RUN(FactorsOfMoreThan2To31Elements);
  RUN(TensorsOfMoreThan2To31ElementsByTopK);
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  std::printf("at most %ld MiB resident\n", usage.ru_maxrss / 1024);
}
