// Compares the preconditioner's kernel with its definition, for any number of threads.
#include "../kernels/precondition.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

constexpr AdamSettings kAdam{0.9f, 1e-3f, 2.0f};

struct Divided {
  explicit Divided(std::vector<int64_t> sizes) {
    for (int64_t size : sizes) {
      gradients.emplace_back(size);
      for (int64_t i = 0; i < size; ++i) gradients.back()[i] = std::sin(0.7f * i + size);
      moments.emplace_back(size, 0.25f);
      outputs.emplace_back(size);
    }
  }

  void Run(const ParallelFor& parallel_for) {
    std::vector<PreconditionTensor> tensors;
    for (size_t i = 0; i < gradients.size(); ++i) {
      tensors.push_back({moments[i].data(), gradients[i].data(), GradientType::kFloat,
                         static_cast<int64_t>(gradients[i].size()), outputs[i].data(), nullptr,
                         adam[i % adam.size()]});
    }
    Precondition(tensors, parallel_for);
  }

  void CheckQuotients() const {
    for (size_t i = 0; i < gradients.size(); ++i) {
      const float scale = adam[i % adam.size()].scale;
      for (size_t j = 0; j < gradients[i].size(); ++j) {
        const float value = gradients[i][j];
        const float moment = 0.25f + (1 - 0.9f) * (value * value - 0.25f);
        CHECK(moments[i][j] == moment);
        CHECK(outputs[i][j] == value / (std::sqrt(scale) * std::sqrt(moment) + 1e-3f));
      }
    }
  }

  Tensors gradients, moments, outputs;
  std::vector<AdamSettings> adam = {kAdam};
};

void DividesByTheRootOnAnyNumberOfThreads() {
  for (int threads : {1, 3}) {
    Divided tensors({1, 0, 200'000, 7});
    tensors.Run(Threads(threads));
    tensors.CheckQuotients();
  }
}

void EachTensorHasSettingsOfItsOwn() {
  Divided tensors({100, 200'000});
  tensors.adam.push_back({kAdam.beta_2, kAdam.epsilon, 10.0f});
  tensors.Run(Threads(2));
  tensors.CheckQuotients();
}

void RootsDoNotOverflow() {
  Divided tensors({1});
  tensors.gradients[0][0] = 1.5e19f;
  tensors.Run(Threads(1));
  CHECK(tensors.outputs[0][0] > 2);  // 1 / sqrt(2 * 0.1)
}

void LeavesMomentsWhereNotFinite() {
  Divided tensors({5, 200'000});
  tensors.gradients[1][199'999] = std::numeric_limits<float>::infinity();
  tensors.Run(Threads(2));
  for (const auto& moments : tensors.moments) {
    for (float moment : moments) CHECK(moment == 0.25f);
  }
  for (const auto& outputs : tensors.outputs) {
    for (float output : outputs) CHECK(std::isnan(output));
  }
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(DividesByTheRootOnAnyNumberOfThreads);
  RUN(EachTensorHasSettingsOfItsOwn);
  RUN(RootsDoNotOverflow);
  RUN(LeavesMomentsWhereNotFinite);
}
