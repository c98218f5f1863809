// Compares the GPU kernels of ScaleCom and RandomK, in the emulator, with the CPU kernels.
#include "gpu_emulator.h"

#include "../gpu/chunks.cu"

#include <limits>

#include "../gpu/chunks_on_gpu.h"
#include "check.h"
#include "emulated_queue.h"
#include "support.h"

namespace gradcomp {
namespace {

const EmulatedKernels kKernels = {GRADCOMP_CHUNKS_KERNELS(EMULATED)};

// Empty tensors, and chunks of one, of few and of very many elements.
const std::vector<int64_t> kSizes = {30001, 7, 0, 60, 0, 70003, 1, 3000, 9, 5000, 4999, 512, 0};
const std::vector<int64_t> kChunkSizes = {400, 25, 25, 25, 3, 65536, 25, 1, 25, 16, 4096, 4096, 9};

struct Chunked : Replica {
  Tensors outputs;

  explicit Chunked(const std::vector<int64_t>& sizes) : Replica(sizes) {
    for (int64_t size : sizes) outputs.emplace_back(size, 7.0f);
  }
};

std::vector<int32_t> SelectOnGpu(const ChunkLayout& layout, const std::vector<Source>& sources,
                                 unsigned seed, bool finite = true) {
  EmulatedQueue queue(kKernels, seed);
  const SelectedOnGpu selected = SelectLargestOnGpu(layout, sources, true, &queue);
  CHECK(*selected.not_finite == !finite);
  return {selected.offsets, selected.offsets + layout.num_words()};
}

// Takes a step on the CPU, and then in the emulator with several orders of threads.
void CheckStep(GradientType type, float filter, bool with_rests) {
  const ChunkLayout layout(kSizes, kChunkSizes);
  Chunked expected(kSizes);
  std::vector<int32_t> offsets(layout.num_words());
  CHECK(SelectLargest(layout, expected.Sources(type), Threads(1), offsets.data()));
  std::vector<float> values(layout.num_chunks());
  TakeChosen(layout, expected.Sources(type), offsets.data(), Threads(1), values.data());
  const std::vector<float> rests = Normal(layout.num_chunks(), 0.1f, 5);
  const float* given = with_rests ? rests.data() : nullptr;
  ApplyTotals(layout, expected.Sources(type), offsets.data(), values.data(), given, filter, Threads(1),
              Pointers(&expected.outputs));
  for (unsigned seed : {1, 20}) {
    Chunked chunked(kSizes);
    const auto sources = chunked.Sources(type);
    CHECK(SelectOnGpu(layout, sources, seed) == offsets);
    EmulatedQueue queue(kKernels, seed);
    const float* taken = TakeChosenOnGpu(layout, sources, offsets.data(), &queue);
    CHECK(SameBits({taken, taken + values.size()}, values));
    ApplyTotalsOnGpu(layout, sources, offsets.data(), values.data(), given, filter, &queue,
                     Pointers(&chunked.outputs));
    CheckSame(chunked.residuals, expected.residuals);
    CheckSame(chunked.outputs, expected.outputs);
  }
}

void StepsAreThoseOfTheCpu() {
  CheckStep(GradientType::kFloat, 1, false);
  CheckStep(GradientType::kHalf, 0.3f, true);
  CheckStep(GradientType::kBFloat16, 0.1f, false);
}

void OfEqualMagnitudesTheFirstIsChosen() {
  const ChunkLayout layout(kSizes, kChunkSizes);
  for (uint32_t kinds : {1, 2, 5}) {
    Chunked chunked(kSizes);
    std::mt19937 engine(kinds);
    for (size_t i = 0; i < kSizes.size(); ++i) {
      for (float& value : chunked.residuals[i]) value = engine() % 2 ? 0.0f : -0.0f;
      for (float& value : chunked.gradients[i]) {
        value = (engine() % 2 ? 1.0f : -1.0f) * (engine() % kinds);
      }
    }
    const auto sources = chunked.Sources();
    std::vector<int32_t> offsets(layout.num_words());
    SelectLargest(layout, sources, Threads(1), offsets.data());
    CHECK(SelectOnGpu(layout, sources, kinds) == offsets);
  }
}

void DrawnPlacesAreTakenAsOnTheCpu() {
  const ChunkLayout layout(kSizes, kChunkSizes);
  Chunked chunked(kSizes);
  const auto sources = chunked.Sources();
  std::vector<int32_t> offsets(layout.num_words());
  DrawOffsets(layout, 4, offsets.data());
  std::vector<float> values(layout.num_chunks());
  TakeChosen(layout, sources, offsets.data(), Threads(1), values.data());
  EmulatedQueue queue(kKernels, 1);
  const float* taken = TakeChosenOnGpu(layout, sources, offsets.data(), &queue);
  CHECK(SameBits({taken, taken + values.size()}, values));
}

void WhatIsNotFiniteIsFoundInEveryKindOfChunk() {
  const ChunkLayout layout(kSizes, kChunkSizes);
  for (size_t i : {0, 3, 5, 7, 9, 11}) {
    for (float bad : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
      Chunked chunked(kSizes);
      chunked.gradients[i].back() = bad;
      SelectOnGpu(layout, chunked.Sources(), 1, /*finite=*/false);
      EmulatedQueue queue(kKernels, 1);
      CHECK(*SelectLargestOnGpu(layout, chunked.Sources(), false, &queue)
                 .not_finite == 1);
    }
  }
}

void SkippedGradientsAreKeptAsOnTheCpu() {
  const ChunkLayout layout(kSizes, kChunkSizes);
  Chunked expected(kSizes);
  KeepGradients(layout, expected.Sources(), 0.3f, Threads(1));
  Chunked chunked(kSizes);
  EmulatedQueue queue(kKernels, 1);
  KeepGradientsOnGpu(layout, chunked.Sources(), 0.3f, &queue);
  CheckSame(chunked.residuals, expected.residuals);
}

void OfNoElementsThereIsNothingToDo() {
  const ChunkLayout layout({0, 0}, {25, 1});
  Chunked chunked({0, 0});
  const auto sources = chunked.Sources();
  EmulatedQueue queue(kKernels, 1);
  CHECK(SelectLargestOnGpu(layout, sources, true, &queue).not_finite == nullptr);
  TakeChosenOnGpu(layout, sources, nullptr, &queue);
  ApplyTotalsOnGpu(layout, sources, nullptr, nullptr, nullptr, 1, &queue,
                   Pointers(&chunked.outputs));
  KeepGradientsOnGpu(layout, sources, 1, &queue);
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(StepsAreThoseOfTheCpu);
  RUN(OfEqualMagnitudesTheFirstIsChosen);
  RUN(DrawnPlacesAreTakenAsOnTheCpu);
  RUN(WhatIsNotFiniteIsFoundInEveryKindOfChunk);
  RUN(SkippedGradientsAreKeptAsOnTheCpu);
  RUN(OfNoElementsThereIsNothingToDo);
}
