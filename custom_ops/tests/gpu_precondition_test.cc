// Compares the GPU kernels that divide by second moments, in the emulator, with the CPU kernels.
#include "gpu_emulator.h"

#include "../gpu/precondition.cu"

#include <limits>

#include "../gpu/precondition_on_gpu.h"
#include "check.h"
#include "emulated_queue.h"
#include "support.h"

namespace gradcomp {
namespace {

const EmulatedKernels kKernels = {GRADCOMP_PRECONDITION_KERNELS(EMULATED)};
constexpr AdamSettings kAdam{0.999f, 1e-7f, 300.0f}, kOther{0.99f, 1e-3f, 2.0f};
constexpr float kInfinite = std::numeric_limits<float>::infinity();
const std::vector<int64_t> kSizes = {1, 0, 9001, 4096, 7};

struct Given {
  Tensors values;                             // the gradients
  std::vector<std::vector<uint16_t>> halves;  // the gradients' upper bits, for types of two bytes
  Tensors squares;                           // for some gradients
  GradientType type;
};

Given Draw(GradientType type, bool with_squares) {
  Given given = {{}, {}, {}, type};
  for (size_t i = 0; i < kSizes.size(); ++i) {
    given.values.push_back(Normal(kSizes[i], 0.3f, i));
    given.halves.push_back(UpperHalves(given.values[i]));
    const bool has_some = with_squares && i % 2 == 0;
    given.squares.emplace_back(has_some ? kSizes[i] : 0, 0.25f);
  }
  return given;
}

struct Result {
  Tensors moments;
  Tensors outputs;

  Result() {
    for (int64_t size : kSizes) {
      moments.emplace_back(size, 0.01f);
      outputs.emplace_back(size, 7.0f);
    }
  }

  std::vector<PreconditionTensor> Of(const Given& given) {
    std::vector<PreconditionTensor> tensors;
    for (size_t i = 0; i < kSizes.size(); ++i) {
      const bool is_float = given.type == GradientType::kFloat;
      const void* gradient = is_float ? static_cast<const void*>(given.values[i].data())
                                      : given.halves[i].data();
      tensors.push_back({moments[i].data(), gradient, given.type, kSizes[i], outputs[i].data(),
                         given.squares[i].empty() ? nullptr : given.squares[i].data(),
                         i == 2 ? kOther : kAdam});
    }
    return tensors;
  }
};

void CheckEqual(const Given& given) {
  Result expected;
  Precondition(expected.Of(given), Threads(1));
  for (unsigned seed : {1, 2}) {
    Result result;
    EmulatedQueue queue(kKernels, seed);
    PreconditionOnGpu(result.Of(given), &queue);
    CheckSame(result.moments, expected.moments);
    CheckSame(result.outputs, expected.outputs);
  }
}

void DividesAsTheCpuDoes() {
  for (GradientType type : {GradientType::kFloat, GradientType::kHalf, GradientType::kBFloat16}) {
    for (bool with_squares : {false, true}) CheckEqual(Draw(type, with_squares));
  }
}

void WhereNotAllIsFiniteMomentsStay() {
  for (float bad : {kInfinite, -kInfinite, std::nanf(""), 1e20f}) {
    for (bool with_squares : {false, true}) {
      Given given = Draw(GradientType::kFloat, with_squares);
      given.values[2][8999] = bad;
      CheckEqual(given);
    }
  }
  Given given = Draw(GradientType::kFloat, true);
  given.squares[2][4097] = kInfinite;
  CheckEqual(given);
}

void OfNoElementsThereIsNothingToDo() {
  EmulatedQueue queue(kKernels, 1);
  PreconditionOnGpu({{nullptr, nullptr, GradientType::kFloat, 0, nullptr}}, &queue);
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(DividesAsTheCpuDoes);
  RUN(WhereNotAllIsFiniteMomentsStay);
  RUN(OfNoElementsThereIsNothingToDo);
}
