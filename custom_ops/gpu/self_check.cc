#include "self_check.h"

#include <cstring>

#include "check_support.h"

namespace gradcomp {

void OnThisThread(int64_t count, int64_t, const Work& work) { work(0, count); }

Tensors NumbersOf(const std::vector<int64_t>& sizes, uint32_t seed) {
  Tensors tensors;
  uint32_t state = seed;
  for (int64_t size : sizes) {
    tensors.emplace_back(size);
    for (float& value : tensors.back()) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(static_cast<int32_t>(state) >> 12) * 0x1p-19f;
    }
  }
  return tensors;
}

std::vector<float*> Pointers(Tensors* tensors) {
  std::vector<float*> pointers;
  for (auto& tensor : *tensors) pointers.push_back(tensor.data());
  return pointers;
}

std::vector<Source> Sources(const std::vector<float*>& residuals,
                            const std::vector<float*>& gradients) {
  std::vector<Source> sources;
  for (size_t i = 0; i < residuals.size(); ++i) {
    sources.push_back({residuals[i], gradients[i], GradientType::kFloat});
  }
  return sources;
}

std::vector<float*> Upload(const Tensors& tensors, DriverQueue* queue) {
  std::vector<float*> on_gpu;
  for (const auto& tensor : tensors) on_gpu.push_back(CopyToGpu(queue, tensor));
  return on_gpu;
}

bool AreEqual(const std::vector<float*>& on_gpu, const Tensors& expected, DriverQueue* queue) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t bytes = 4 * expected[i].size();
    std::vector<float> values(expected[i].size());
    queue->Download(on_gpu[i], bytes, values.data());
    if (std::memcmp(values.data(), expected[i].data(), bytes) != 0) return false;
  }
  return true;
}

Status CheckAgainstCpu(DriverQueue* queue) {
  for (const auto check :
       {CheckAdaComp, CheckPrecondition, CheckChunks, CheckPowerSgd, CheckFixedLength}) {
    const Status status = check(queue);
    const Status device = queue->status();
    const Status& first = device.ok() ? status : device;
    if (!first.ok()) return {Concat("the check of the kernels fails: ", first.message)};
  }
  return {};
}

}  // namespace gradcomp
