// Compares AdaComp's GPU kernels, in the emulator, with its CPU kernels.
#include "gpu_emulator.h"

#include "../gpu/adacomp_decode.cu"
#include "../gpu/adacomp_pack.cu"
#include "../gpu/adacomp_scan.cu"

#include <cmath>
#include <limits>

#include "../gpu/adacomp_on_gpu.h"
#include "check.h"
#include "emulated_queue.h"
#include "support.h"

namespace gradcomp {
namespace {

const EmulatedKernels kKernels = {GRADCOMP_ADACOMP_KERNELS(EMULATED)};
constexpr AdamSettings kAdam{0.999f, 1e-7f, 300.0f};

struct GpuEncoded {
  std::vector<int32_t> payload;
  Tensors residuals;
  Tensors moments;
};

// Does the work of Encode in support.h on the emulator.
template <typename Gradient>
GpuEncoded EncodeOnGpu(const Tensors& residuals, const std::vector<std::vector<Gradient>>& gradients,
                       const std::vector<int64_t>& bin_sizes, const EncodeSettings& settings,
                       const Tensors& moments = {}, unsigned seed = 1,
                       const Tensors& squares = {}) {
  GpuEncoded encoded{{}, residuals, moments};
  std::vector<EncoderTensor> tensors;
  for (size_t i = 0; i < residuals.size(); ++i) {
    tensors.push_back({encoded.residuals[i].data(), gradients[i].data(), settings.type,
                       static_cast<int64_t>(gradients[i].size()), bin_sizes[i],
                       moments.empty() ? nullptr : encoded.moments[i].data(),
                       squares.empty() ? nullptr : squares[i].data(), settings.adam});
  }
  EmulatedQueue queue(kKernels, seed);
  const EncodedOnGpu on_gpu = EncodeAdaComp(tensors, settings.scale_factor, &queue);
  const PayloadHeader header =
      HeaderOf(bin_sizes, on_gpu.summary->finite, on_gpu.summary->body_words);
  encoded.payload.resize(header.length);
  std::copy_n(on_gpu.body, on_gpu.summary->body_words, encoded.payload.data() + kHeaderWords);
  WriteHeader(header, encoded.payload.data());
  return encoded;
}

template <typename Gradient>
void CheckEqual(const Tensors& start, const std::vector<std::vector<Gradient>>& gradients,
                const std::vector<int64_t>& bin_sizes, GradientType type, bool divides,
                float scale_factor = 2) {
  const EncodeSettings settings = {scale_factor, Threads(1), BestSimd(), type, kAdam};
  Tensors residuals = start;
  Tensors moments;
  for (const auto& tensor : start) moments.emplace_back(divides ? tensor.size() : 0, 0.01f);
  const Tensors moments_before = divides ? moments : Tensors();
  const auto payload = Encode<Gradient>(&residuals, gradients, bin_sizes, settings,
                                        divides ? &moments : nullptr);
  const GpuEncoded encoded =
      EncodeOnGpu<Gradient>(start, gradients, bin_sizes, settings, moments_before);
  CHECK(encoded.payload == payload);
  for (size_t i = 0; i < start.size(); ++i) {
    CHECK(SameBits(encoded.residuals[i], residuals[i]));
    if (divides) CHECK(SameBits(encoded.moments[i], moments[i]));
  }
}

void EncodesAsTheCpuDoes() {
  for (int64_t bin_size : {0, 1, 3, 15, 16, 50, 63, 64, 500, 2044, 2045, 4097, 16383}) {
    for (int64_t size : {1, 17, 4099}) {
      CheckEqual<float>({Normal(size, 1, 1)}, {Normal(size, 0.3f, 2)}, {bin_size},
                        GradientType::kFloat, false);
    }
    const int64_t size = 16500;
    CheckEqual<float>({Normal(size, 1, 1)}, {Normal(size, 0.3f, 2)}, {bin_size},
                      GradientType::kFloat, true, 1.7f);
    CheckEqual<Half>({Normal(size, 1, 1)}, {Halves(size, 3)}, {bin_size}, GradientType::kHalf,
                     true);
    CheckEqual<BFloat16>({Normal(size, 1, 1)}, {BrainFloats(size, 0.3f, 4)}, {bin_size},
                         GradientType::kBFloat16, false);
    for (float scale_factor : {1.0f, 3e38f}) {
      CheckEqual<float>({Normal(size, 1, 1)}, {Normal(size, 0.3f, 2)}, {bin_size},
                        GradientType::kFloat, false, scale_factor);
    }
  }
  for (int64_t bin_size : {0, 1, 500, 4097, 16383}) {  // two blocks
    CheckEqual<float>({Normal(70001, 1, 1)}, {Normal(70001, 0.3f, 2)}, {bin_size},
                      GradientType::kFloat, false);
  }
  CheckEqual<float>({Normal(200000, 1, 1)}, {Normal(200000, 0.3f, 2)}, {50}, GradientType::kFloat,
                    false);  // four blocks
}

// One array of a tensor is misaligned, so that no four elements can be loaded as a vector.
void AnArrayMayBeginAnywhere() {
  constexpr int64_t kSize = 13001;
  enum { kResidual, kGradient, kMoment, kSquares, kArrays };
  for (int64_t bin_size : {0, 3, 50, 5000}) {
    for (int shifted = 0; shifted < kArrays; ++shifted) {
      int64_t shift[kArrays] = {};
      shift[shifted] = 1 + bin_size % 3;
      const auto gradient = Normal(kSize + shift[kGradient], 0.3f, 2);
      const std::vector<float> squares(kSize + shift[kSquares], 0.25f);
      const auto tensors = [&](std::vector<float>* residual, std::vector<float>* moment) {
        return std::vector<EncoderTensor>{
            {residual->data() + shift[kResidual], gradient.data() + shift[kGradient],
             GradientType::kFloat, kSize, bin_size, moment->data() + shift[kMoment],
             squares.data() + shift[kSquares], kAdam}};
      };
      std::vector<float> on_cpu = Normal(kSize + shift[kResidual], 1, 1);
      std::vector<float> on_gpu = on_cpu;
      std::vector<float> cpu_moment(kSize + shift[kMoment], 0.01f);
      std::vector<float> gpu_moment = cpu_moment;
      AdaCompEncoder encoder(tensors(&on_cpu, &cpu_moment), 2, Threads(1));
      CHECK(encoder.Run());
      std::vector<int32_t> body(encoder.body_words());
      encoder.WriteBody(body.data());
      EmulatedQueue queue(kKernels, 1);
      const EncodedOnGpu found = EncodeAdaComp(tensors(&on_gpu, &gpu_moment), 2, &queue);
      CHECK(std::vector<int32_t>(found.body, found.body + found.summary->body_words) == body);
      CHECK(SameBits(on_gpu, on_cpu));
      CHECK(SameBits(gpu_moment, cpu_moment));
    }
  }
}

// Tests as many pieces as in a tensor of many millions of elements.
void ManyPiecesFollowEachOther() {
  constexpr int kPieces = 9001;
  gpu::EncodeTensor tensor = {};
  tensor.num_pieces = kPieces;
  tensor.num_bins = 1 << 20;
  tensor.code_bytes = 2;
  tensor.length_words = 5;
  std::vector<unsigned> codes(kPieces);
  std::vector<double> sums(kPieces);
  std::vector<long long> bytes(kPieces);
  std::mt19937 engine(3);
  double sum = 0;
  for (int i = 0; i < kPieces; ++i) {
    codes[i] = engine() % 4000;
    sums[i] = engine() % 1000;  // whose sum is exact
    sum += sums[i];
  }
  float scale = 0;
  unsigned words = 0;
  gpu::EncodeStep step = {};
  step.tensors = &tensor;
  step.num_tensors = 1;
  step.piece_codes = codes.data();
  step.piece_sum = sums.data();
  step.piece_byte = bytes.data();
  step.scale = &scale;
  step.code_words = &words;
  EmulatedQueue(kKernels, 1).Launch("gradcomp_adacomp_tensors", 1, &step);
  long long byte = 4 * tensor.length_words;
  for (int i = 0; i < kPieces; ++i) {
    CHECK(bytes[i] == byte);
    byte += 2 * codes[i];
  }
  CHECK(words == (byte + 3) / 4);
  CHECK(scale == static_cast<float>(sum / tensor.num_bins));
}

void GivenSquaresAreTakenAsOnTheCpu() {
  const float infinity = std::numeric_limits<float>::infinity();
  for (float last : {0.5f, infinity}) {
    for (int64_t bin_size : {0, 50, 6000}) {
      const Tensors start = {Normal(13000, 1, 1)};
      const Tensors gradients = {Normal(13000, 0.3f, 2)};
      const Tensors moments = {std::vector<float>(13000, 0.01f)};
      Tensors squares = {std::vector<float>(13000, 0.25f)};
      squares[0].back() = last;
      const EncodeSettings settings = {2, Threads(1), BestSimd(), GradientType::kFloat, kAdam};
      Tensors residuals = start;
      Tensors on_cpu = moments;
      const auto payload =
          Encode<float>(&residuals, gradients, {bin_size}, settings, &on_cpu, squares);
      const auto encoded =
          EncodeOnGpu<float>(start, gradients, {bin_size}, settings, moments, 1, squares);
      CHECK(encoded.payload == payload);
      if (last < infinity) {
        CHECK(SameBits(encoded.residuals[0], residuals[0]));
        CHECK(SameBits(encoded.moments[0], on_cpu[0]));
      } else {
        CHECK(encoded.moments[0].back() == 0.01f);
      }
    }
  }
}

void ManyTensorsAreOnePayload() {
  Tensors residuals;
  Tensors gradients;
  std::vector<int64_t> bin_sizes;
  for (int i = 0; i < 520; ++i) {  // more than the threads of a block of the layout kernel
    const int64_t size = i % 7 == 3 ? 0 : i == 200 ? 140000 : 1 + i % 90;
    residuals.push_back(Normal(size, 1, 3 * i));
    gradients.push_back(Normal(size, 0.3f, 3 * i + 1));
    bin_sizes.push_back(std::vector<int64_t>{50, 500, 0, 7}[i % 4]);
  }
  CheckEqual<float>(residuals, gradients, bin_sizes, GradientType::kFloat, false);
  CheckEqual<float>({{}}, {{}}, {50}, GradientType::kFloat, true);
  CheckEqual<float>({{}, {}}, {{}, {}}, {0, 500}, GradientType::kFloat, false);
}

void ZerosTiesAndDenormalsAreAsOnTheCpu() {
  const std::vector<float> zeros(4500, 0.0f);
  std::vector<float> signed_zeros(4500, 0.0f);
  for (size_t i = 0; i < signed_zeros.size(); i += 2) signed_zeros[i] = -0.0f;
  const std::vector<float> ones(4500, 1.0f);
  const std::vector<float> special = {0.0f,    -0.0f, 1e-45f, -1e-45f, 1e-39f, 1.0f,
                                      -1.0f,   1.0f,  0.5f,   3e38f,   -3e38f, 1.17549435e-38f};
  std::mt19937 engine(5);
  std::vector<float> mixed(4500);
  for (float& value : mixed) value = special[engine() % special.size()] * 0.5f;
  const std::vector<const std::vector<float>*> kinds = {&zeros, &signed_zeros, &ones, &mixed};
  for (int64_t bin_size : {0, 4, 50, 500, 6000}) {
    for (const auto* residual : kinds) {
      for (const auto* gradient : kinds) {
        if (residual == &mixed && gradient == &mixed) continue;  // overflows
        CheckEqual<float>({*residual}, {*gradient}, {bin_size}, GradientType::kFloat, false);
      }
    }
  }
  CheckEqual<float>({zeros}, {mixed}, {50}, GradientType::kFloat, false, 3.0f);
  std::vector<float> whole(4500);
  std::vector<float> against(4500);  // accumulated values are often 0 while boosted values are not
  for (size_t i = 0; i < whole.size(); ++i) {
    whole[i] = static_cast<float>(1 + engine() % 2);
    against[i] = engine() % 3 ? -whole[i] : 0.0f;
  }
  CheckEqual<float>({against}, {whole}, {50}, GradientType::kFloat, false);
}

// Another order of the double sums changes the rounded float only near a tie.
void TheScaleIsTheMeanToItsLastBit() {
  std::vector<float> values = Normal(60000, 1, 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= std::ldexp(1.0f, i % 80);
  Tensors residuals = {values};
  const Tensors gradients = {std::vector<float>(values.size(), 0.0f)};
  const auto payload = Encode<float>(&residuals, gradients, {50});
  const auto on_gpu = EncodeOnGpu<float>({values}, gradients, {50}, {});
  CHECK(std::abs(payload[kHeaderWords] - on_gpu.payload[kHeaderWords]) <= 1);
  AdaCompDecoder decoder({{60000, 50}}, kFingerprint, Threads(1));
  CHECK(decoder.Read(on_gpu.payload.data(), 1, on_gpu.payload.size(), kStep).ok());
  Tensors sum = Zeros({{60000, 50}});
  CHECK(decoder.Reduce(Pointers(&sum)));
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK(on_gpu.residuals[0][i] == values[i] - sum[0][i]);  // for any scale
  }
}

void TheOrderOfThreadsAndBlocksDoesNotMatter() {
  const Tensors start = {Normal(70001, 1, 1), Normal(9000, 1, 2), Normal(20000, 1, 3)};
  const Tensors gradients = {Normal(70001, 1, 4), Normal(9000, 1, 5), Normal(20000, 1, 6)};
  const std::vector<int64_t> bin_sizes = {50, 0, 16383};
  const Tensors moments = {std::vector<float>(70001, 0.01f), std::vector<float>(9000, 0.01f),
                           std::vector<float>(20000, 0.01f)};
  EncodeSettings settings;
  settings.adam = kAdam;
  const auto expected = EncodeOnGpu<float>(start, gradients, bin_sizes, settings, moments);
  for (unsigned seed : {100, 200, 300}) {
    const auto encoded =
        EncodeOnGpu<float>(start, gradients, bin_sizes, settings, moments, seed);
    CHECK(encoded.payload == expected.payload);
    for (size_t i = 0; i < start.size(); ++i) {
      CHECK(SameBits(encoded.residuals[i], expected.residuals[i]));
      CHECK(SameBits(encoded.moments[i], expected.moments[i]));
    }
  }
}

void AStepWithAGradientThatIsNotFiniteChangesNothing() {
  const std::vector<int64_t> bin_sizes = {50, 500, 0, 6000};
  const float infinity = std::numeric_limits<float>::infinity();
  for (bool divides : {false, true}) {
    for (size_t bad = 0; bad < bin_sizes.size(); ++bad) {
      Tensors gradients, before, moments;
      for (uint32_t i = 0; i < bin_sizes.size(); ++i) {
        gradients.push_back(Normal(13000, 0.3f, i));
        before.push_back(Normal(13000, 1, 10 + i));
        if (divides) moments.emplace_back(13000, 0.01f);
      }
      // At the beginning, or late in a large bin.
      gradients[bad][divides ? 0 : 11900] = bad % 2 ? std::nanf("") : -infinity;
      const EncodeSettings settings = {2, Threads(1), BestSimd(), GradientType::kFloat, kAdam};
      const auto encoded = EncodeOnGpu<float>(before, gradients, bin_sizes, settings, moments);
      Tensors residuals = before;
      Tensors on_cpu = moments;
      CHECK(encoded.payload == Encode<float>(&residuals, gradients, bin_sizes, settings,
                                             divides ? &on_cpu : nullptr));
      CHECK(static_cast<int64_t>(encoded.payload.size()) == kHeaderWords);
      for (size_t i = 0; i < bin_sizes.size(); ++i) {
        CHECK(SameBits(encoded.residuals[i], before[i]));
        if (divides) CHECK(SameBits(encoded.moments[i], moments[i]));
      }
    }
  }
}

// As in AdaCompEncoder::Rollback, without memory for the payload.
void WhatCannotBeSentIsTakenBackAsOnTheCpu() {
  const std::vector<int64_t> bin_sizes = {50, 500, 0, 6000, 7};
  const std::vector<float> given(13000, 0.25f);
  for (bool divides : {false, true}) {
    Tensors on_cpu, on_gpu, cpu_moments, gpu_moments;
    std::vector<std::vector<BFloat16>> gradients;
    for (uint32_t i = 0; i < bin_sizes.size(); ++i) {
      gradients.push_back(BrainFloats(13000, 0.3f, i));
      on_cpu.push_back(Normal(13000, 1, 10 + i));
      cpu_moments.emplace_back(13000, 0.01f);
    }
    on_gpu = on_cpu;
    gpu_moments = cpu_moments;
    const auto tensors = [&](Tensors* residuals, Tensors* moments) {
      std::vector<EncoderTensor> all;
      for (size_t i = 0; i < bin_sizes.size(); ++i) {
        all.push_back({(*residuals)[i].data(), gradients[i].data(), GradientType::kBFloat16, 13000,
                       bin_sizes[i], divides ? (*moments)[i].data() : nullptr,
                       i % 2 ? given.data() : nullptr, kAdam});
      }
      return all;
    };
    AdaCompEncoder encoder(tensors(&on_cpu, &cpu_moments), 2, Threads(1));
    CHECK(encoder.Run());
    encoder.Rollback();
    EmulatedQueue queue(kKernels, 1);
    TakeBackAdaComp(EncodeAdaComp(tensors(&on_gpu, &gpu_moments), 2, &queue), &queue);
    for (size_t i = 0; i < bin_sizes.size(); ++i) {
      CHECK(SameBits(on_gpu[i], on_cpu[i]));
      CHECK(SameBits(gpu_moments[i], cpu_moments[i]));
    }
  }
}

void AnOverflowingSumIsNotWritten() {
  const Tensors residuals = {{1, 2, 3e38f, 3e38f}};
  const auto encoded = EncodeOnGpu<float>(residuals, {{0.5f, 1, 3e38f, 0}}, {2}, {});
  CHECK(static_cast<int64_t>(encoded.payload.size()) == kHeaderWords);
  CHECK(SameBits(encoded.residuals[0], residuals[0]));
}

struct Received {
  // With bins of 7, a block has more codes than its threads read at a time; with bins of 255, units
  // are not multiples of vectors.
  std::vector<DecoderTensor> tensors = {{140003, 50}, {1, 1},         {0, 50},    {9000, 500}, {2500, 0},
                                        {70, 63},     {33000, 16383}, {66000, 7}, {40000, 255}};
  std::vector<int32_t> rows;
  int64_t row_words = 0;
};

Received Receive(int64_t num_payloads, int64_t not_finite = -1) {
  Received received;
  std::vector<std::vector<int32_t>> payloads;
  for (int64_t payload = 0; payload < num_payloads; ++payload) {
    Tensors residuals, gradients;
    std::vector<int64_t> bin_sizes;
    for (const DecoderTensor& tensor : received.tensors) {
      residuals.push_back(Normal(tensor.size, 1, 9 * payload));
      gradients.push_back(Normal(tensor.size, payload == 1 ? 5 : 0.3f, 9 * payload + 1));
      bin_sizes.push_back(tensor.bin_size);
    }
    if (payload == not_finite) gradients[0][0] = std::nanf("");
    payloads.push_back(Encode<float>(&residuals, gradients, bin_sizes));
    received.row_words = std::max<int64_t>(received.row_words, payloads.back().size());
  }
  for (auto& payload : payloads) {
    payload.resize(received.row_words);
    received.rows.insert(received.rows.end(), payload.begin(), payload.end());
  }
  return received;
}

void DecodesAsTheCpuDoes() {
  for (int64_t num_payloads : {1, 3, gpu::kPayloadsAtOnce + 2}) {
    const Received received = Receive(num_payloads);
    AdaCompDecoder decoder(received.tensors, kFingerprint, Threads(1));
    CHECK(decoder.Read(received.rows.data(), num_payloads, received.row_words, kStep).ok());
    Tensors expected = Zeros(received.tensors);
    CHECK(decoder.Reduce(Pointers(&expected)));
    for (unsigned shift : {0, 1}) {  // a shift of 1 misaligns all elements
      Tensors sums;
      std::vector<float*> shifted;
      for (const DecoderTensor& tensor : received.tensors) {
        sums.emplace_back(tensor.size + shift, std::nanf(""));
      }
      for (auto& sum : sums) shifted.push_back(sum.data() + shift);
      EmulatedQueue queue(kKernels, /*seed=*/1 + shift);
      CHECK(decoder.ReducesToFinite());
      DecodeAdaComp(decoder, shifted, /*adds=*/false, &queue);
      for (size_t i = 0; i < sums.size(); ++i) {
        CHECK(SameBits({sums[i].begin() + shift, sums[i].end()}, expected[i]));
      }
    }
  }
}

// A payload that is not finite restores nothing.
void PutsBackAsTheCpuDoes() {
  constexpr int64_t kPayloads = gpu::kPayloadsAtOnce + 2;
  const Received received = Receive(kPayloads, /*not_finite=*/1);
  AdaCompDecoder decoder(received.tensors, kFingerprint, Threads(1));
  CHECK(decoder.Read(received.rows.data(), kPayloads, received.row_words, std::nullopt).ok());
  Tensors expected;
  for (const DecoderTensor& tensor : received.tensors) {
    expected.push_back(Normal(tensor.size, 1, 77));
  }
  Tensors residuals = expected;
  decoder.AddTo(Pointers(&expected));
  EmulatedQueue queue(kKernels, 1);
  DecodeAdaComp(decoder, Pointers(&residuals), /*adds=*/true, &queue);
  for (size_t i = 0; i < residuals.size(); ++i) CHECK(SameBits(residuals[i], expected[i]));
}

void ASumThatOverflowsIsLeftToTheHost() {
  for (int64_t bin_size : {0, 2}) {
    Tensors residuals = {{0, 0, 0}};
    const auto payload = Encode<float>(&residuals, {{3e38f, 3e38f, 3e38f}}, {bin_size});
    std::vector<int32_t> rows = payload;
    rows.insert(rows.end(), payload.begin(), payload.end());
    AdaCompDecoder decoder({{3, bin_size}}, kFingerprint, Threads(1));
    CHECK(decoder.Read(rows.data(), 2, payload.size(), kStep).ok());
    CHECK(!decoder.ReducesToFinite());
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(EncodesAsTheCpuDoes);
  RUN(AnArrayMayBeginAnywhere);
  RUN(ManyPiecesFollowEachOther);
  RUN(GivenSquaresAreTakenAsOnTheCpu);
  RUN(ManyTensorsAreOnePayload);
  RUN(ZerosTiesAndDenormalsAreAsOnTheCpu);
  RUN(TheScaleIsTheMeanToItsLastBit);
  RUN(TheOrderOfThreadsAndBlocksDoesNotMatter);
  RUN(AStepWithAGradientThatIsNotFiniteChangesNothing);
  RUN(WhatCannotBeSentIsTakenBackAsOnTheCpu);
  RUN(AnOverflowingSumIsNotWritten);
  RUN(DecodesAsTheCpuDoes);
  RUN(PutsBackAsTheCpuDoes);
  RUN(ASumThatOverflowsIsLeftToTheHost);
}
