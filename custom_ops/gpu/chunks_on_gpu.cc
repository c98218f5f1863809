#include "chunks_on_gpu.h"

#include "chunks_tables.h"

namespace gradcomp {
namespace {

constexpr int64_t kSmallChunk = 16;         // up to this size, a thread handles a chunk
constexpr int64_t kLargeChunk = 1 << 12;    // from this size on, a block handles a chunk

int WidthOf(int64_t chunk_size) {
  if (chunk_size <= kSmallChunk) return 1;
  return chunk_size < kLargeChunk ? gpu::kLanes : gpu::kThreads;
}

// The tensors in device memory, and the numbers of blocks to launch.
struct Planned {
  gpu::ChunkStep step = {};
  int64_t num_pieces = 0;
  int64_t num_slices = 0;
};

Planned ChunkPlan(const ChunkLayout& layout, const std::vector<Source>& sources,
                  const std::vector<float*>& outputs, GpuQueue* queue) {
  Planned planned;
  std::vector<gpu::ChunkTensor> tensors;
  for (size_t i = 0; i < sources.size(); ++i) {
    const ChunkLayout::Chunked& chunked = layout.tensors()[i];
    const int width = WidthOf(chunked.chunk_size);
    tensors.push_back({sources[i].residual, sources[i].gradient,
                       outputs.empty() ? nullptr : outputs[i], static_cast<int>(sources[i].type),
                       width, chunked.size, chunked.chunk_size, chunked.bits, chunked.num_chunks,
                       chunked.first_chunk, chunked.first_word, planned.num_pieces,
                       planned.num_slices});
    planned.num_pieces += CeilDiv(chunked.num_chunks, gpu::kThreads / width);
    planned.num_slices += CeilDiv(chunked.size, gpu::kSliceElements);
  }
  planned.step.tensors = CopyToGpu(queue, tensors);
  planned.step.num_tensors = tensors.size();
  planned.step.num_chunks = layout.num_chunks();
  planned.step.num_words = layout.num_words();
  return planned;
}

void LaunchByThreads(const char* kernel, int64_t num_threads, const gpu::ChunkStep& step,
                     GpuQueue* queue) {
  if (num_threads > 0) queue->Launch(kernel, CeilDiv(num_threads, gpu::kThreads), &step);
}

int* UploadOffsets(const ChunkLayout& layout, const int32_t* offsets, GpuQueue* queue) {
  return static_cast<int*>(queue->Upload(offsets, 4 * layout.num_words()));
}

}  // namespace

SelectedOnGpu SelectLargestOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                                 bool chooses, GpuQueue* queue) {
  Planned planned = ChunkPlan(layout, tensors, {}, queue);
  gpu::ChunkStep& step = planned.step;
  if (planned.num_pieces == 0) return {nullptr, nullptr};
  step.not_finite = NewOnGpu<int>(queue, 1);
  queue->Zero(step.not_finite, sizeof(int));
  if (chooses) {
    step.chosen = NewOnGpu<unsigned>(queue, step.num_chunks);
    step.offsets = NewOnGpu<int>(queue, step.num_words);
  }
  queue->Launch("gradcomp_chunks_choose", planned.num_pieces, &step);
  if (chooses) LaunchByThreads("gradcomp_chunks_pack", step.num_words, step, queue);
  return {step.offsets, step.not_finite};
}

const float* TakeChosenOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                             const int32_t* offsets, GpuQueue* queue) {
  gpu::ChunkStep step = ChunkPlan(layout, tensors, {}, queue).step;
  step.offsets = UploadOffsets(layout, offsets, queue);
  step.values = NewOnGpu<float>(queue, step.num_chunks);
  LaunchByThreads("gradcomp_chunks_take", step.num_chunks, step, queue);
  return step.values;
}

void ApplyTotalsOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                      const int32_t* offsets, const float* totals, const float* rests,
                      float filter, GpuQueue* queue, const std::vector<float*>& outputs) {
  Planned planned = ChunkPlan(layout, tensors, outputs, queue);
  gpu::ChunkStep& step = planned.step;
  if (step.num_chunks == 0) return;
  const int64_t bytes = 4 * step.num_chunks;
  step.offsets = UploadOffsets(layout, offsets, queue);
  step.totals = static_cast<const float*>(queue->Upload(totals, bytes));
  if (rests) step.rests = static_cast<const float*>(queue->Upload(rests, bytes));
  step.values = NewOnGpu<float>(queue, step.num_chunks);
  step.filter = filter;
  step.kept_share = 1 - filter;
  LaunchByThreads("gradcomp_chunks_keep", step.num_chunks, step, queue);
  queue->Launch("gradcomp_chunks_spread", planned.num_slices, &step);
  LaunchByThreads("gradcomp_chunks_place", step.num_chunks, step, queue);
}

void KeepGradientsOnGpu(const ChunkLayout& layout, const std::vector<Source>& tensors,
                        float filter, GpuQueue* queue) {
  Planned planned = ChunkPlan(layout, tensors, {}, queue);
  planned.step.filter = filter;
  if (planned.num_slices > 0) {
    queue->Launch("gradcomp_chunks_spread", planned.num_slices, &planned.step);
  }
}

}  // namespace gradcomp
