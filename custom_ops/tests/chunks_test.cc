// Tests the chunks of ScaleCom and RandomK under sanitizers. tests/compressors compares them with
// NumPy's.
#include "../kernels/chunks.h"

#include "check.h"
#include "support.h"

namespace gradcomp {
namespace {

// Empty tensors, and chunks of one, of few and of very many elements.
void ChunksAreSentAndKeptOnAnyNumberOfThreads() {
  const std::vector<int64_t> sizes = {300001, 7, 0, 60, 0, 70003, 1, 100000, 9};
  const std::vector<int64_t> chunk_sizes = {400, 25, 25, 25, 3, 65536, 25, 1, 25};
  const ChunkLayout layout(sizes, chunk_sizes);
  CHECK(layout.num_chunks() == 751 + 1 + 3 + 2 + 1 + 100000 + 1);
  std::vector<float> first_values;
  for (int64_t threads : {1, 3}) {
    Replica replica(sizes);
    std::vector<int32_t> offsets(layout.num_words());
    CHECK(SelectLargest(layout, replica.Sources(), Threads(threads), offsets.data()));
    CHECK(CheckOffsets(layout, offsets.data()).ok());
    std::vector<float> values(layout.num_chunks());
    TakeChosen(layout, replica.Sources(), offsets.data(), Threads(threads), values.data());
    if (threads == 1) first_values = values;
    CHECK(SameBits(values, first_values));
    const Replica before = replica;
    Tensors outputs;
    for (int64_t size : sizes) outputs.emplace_back(size, 7.0f);
    ApplyTotals(layout, replica.Sources(), offsets.data(), values.data(), nullptr, 1,
                Threads(threads), Pointers(&outputs));
    int64_t sent = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (int64_t j = 0; j < sizes[i]; ++j) {
        const float sum = before.residuals[i][j] + before.gradients[i][j];
        CHECK(outputs[i][j] + replica.residuals[i][j] == sum);
        CHECK(outputs[i][j] == 0 || replica.residuals[i][j] == 0);
        sent += outputs[i][j] != 0;
      }
    }
    CHECK(sent == layout.num_chunks());
  }
}

// No offsets of another replica cause a read or write out of bounds.
void RandomOffsetsAreRefusedOrInBounds() {
  const std::vector<int64_t> sizes = {1001, 3, 77};
  const ChunkLayout layout(sizes, {100, 7, 7});
  std::mt19937 engine(3);
  int64_t good = 0;
  for (int64_t round = 0; round < 20000; ++round) {
    Replica replica(sizes);
    std::vector<int32_t> offsets(layout.num_words());
    SelectLargest(layout, replica.Sources(), Threads(1), offsets.data());
    for (int64_t n = engine() % 3; n >= 0; --n) {
      offsets[engine() % offsets.size()] ^= 1u << engine() % 32;
    }
    if (!CheckOffsets(layout, offsets.data()).ok()) continue;
    ++good;
    std::vector<float> values(layout.num_chunks());
    TakeChosen(layout, replica.Sources(), offsets.data(), Threads(1), values.data());
    Tensors outputs;
    for (int64_t size : sizes) outputs.emplace_back(size);
    ApplyTotals(layout, replica.Sources(), offsets.data(), values.data(), values.data(), 0.5f,
                Threads(1), Pointers(&outputs));
  }
  CHECK(good > 1000 && good < 19000);
}

}  // namespace
}  // namespace gradcomp

int main() {
  using namespace gradcomp;
  RUN(ChunksAreSentAndKeptOnAnyNumberOfThreads);
  RUN(RandomOffsetsAreRefusedOrInBounds);
}
