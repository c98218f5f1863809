#include <cstring>
#include <limits>
#include <vector>

#include "../kernels/chunks.h"
#include "check_support.h"
#include "chunks_on_gpu.h"
#include "self_check.h"

namespace gradcomp {
namespace {

// A group that spans tensors, and chunks that are a thread's, a warp's and a block's.
const std::vector<int64_t> kChunkedSizes = {9001, 70, 5003, 6000, 55, 300};
const std::vector<int64_t> kChunkSizes = {50, 25, 4500, 7, 25, 1};
const std::vector<int64_t> kGroups = {0, 1, 2, 3, 1, 4};

Status CheckNotFinite(const ChunkLayout& layout, DriverQueue* queue) {
  const Tensors residuals = NumbersOf(kChunkedSizes, 21);
  Tensors gradients = NumbersOf(kChunkedSizes, 22);
  gradients[2][5000] = std::numeric_limits<float>::infinity();
  const auto sources = Sources(Upload(residuals, queue), Upload(gradients, queue));
  int not_finite = 0;
  queue->Download(SelectLargestOnGpu(layout, sources, /*chooses=*/false, queue).not_finite,
                  sizeof not_finite, &not_finite);
  return not_finite ? Status() : Status{"a gradient that is not finite is not found in its chunk"};
}

Status CheckStep(const ChunkLayout& layout, DriverQueue* queue) {
  Tensors residuals = NumbersOf(kChunkedSizes, 21);
  Tensors gradients = NumbersOf(kChunkedSizes, 22);
  Tensors outputs = NumbersOf(kChunkedSizes, 23);
  const std::vector<float*> gpu_residuals = Upload(residuals, queue);
  const std::vector<float*> gpu_outputs = Upload(outputs, queue);
  const auto on_cpu = Sources(Pointers(&residuals), Pointers(&gradients));
  const auto on_gpu = Sources(gpu_residuals, Upload(gradients, queue));

  std::vector<int32_t> offsets(layout.num_words());
  std::vector<int32_t> gpu_offsets(layout.num_words());
  int not_finite = 1;
  SelectLargest(layout, on_cpu, OnThisThread, offsets.data());
  const SelectedOnGpu selected = SelectLargestOnGpu(layout, on_gpu, /*chooses=*/true, queue);
  queue->Download(selected.offsets, 4 * gpu_offsets.size(), gpu_offsets.data());
  queue->Download(selected.not_finite, sizeof not_finite, &not_finite);
  if (not_finite || gpu_offsets != offsets) return {"what is chosen in chunks is not the CPU's"};

  std::vector<float> values(layout.num_chunks());
  std::vector<float> gpu_values(layout.num_chunks());
  const int64_t bytes = 4 * values.size();
  TakeChosen(layout, on_cpu, offsets.data(), OnThisThread, values.data());
  queue->Download(TakeChosenOnGpu(layout, on_gpu, offsets.data(), queue), bytes,
                  gpu_values.data());
  if (std::memcmp(gpu_values.data(), values.data(), bytes) != 0) {
    return {"what is taken from chunks is not the CPU's"};
  }
  ApplyTotals(layout, on_cpu, offsets.data(), values.data(), values.data(), 0.3f, OnThisThread,
              Pointers(&outputs));
  ApplyTotalsOnGpu(layout, on_gpu, offsets.data(), values.data(), values.data(), 0.3f, queue,
                   gpu_outputs);
  if (!AreEqual(gpu_residuals, residuals, queue) || !AreEqual(gpu_outputs, outputs, queue)) {
    return {"what chunks are left with is not the CPU's"};
  }
  return {};
}

}  // namespace

Status CheckChunks(DriverQueue* queue) {
  const ChunkLayout layout(kChunkedSizes, kChunkSizes, kGroups);
  const Status status = CheckStep(layout, queue);
  return status.ok() ? CheckNotFinite(layout, queue) : status;
}

}  // namespace gradcomp
