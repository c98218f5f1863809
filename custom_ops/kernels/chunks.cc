#include "chunks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "simd.h"

namespace gradcomp {
namespace {

constexpr int64_t kStripElements = 1 << 12;  // processed at once, in the first-level cache
constexpr int64_t kChunksPerWords = 32;      // offsets that fill whole words, for any number of bits

int64_t OffsetBits(int64_t chunk_size) {
  int64_t bits = 0;
  while (int64_t{1} << bits < chunk_size) ++bits;
  return bits;
}

void ForEachBlock(const ChunkLayout& layout, const ParallelFor& parallel_for,
                  const std::function<void(const ChunkLayout::Block&)>& work) {
  parallel_for(layout.blocks().size(), kBlockSize, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t i = begin; i < end; ++i) work(layout.blocks()[i]);
  });
}

int64_t ChunkLength(const ChunkLayout::Block& block, int64_t chunk) {
  return std::min(block.chunk_size, block.end - block.begin - chunk * block.chunk_size);
}

int64_t StripChunks(const ChunkLayout::Block& block) {
  return std::max<int64_t>(1, kStripElements / block.chunk_size);
}

void Pack(const ChunkLayout::Block& block, const std::vector<uint32_t>& values, int32_t* offsets) {
  const int64_t bits = block.bits;
  if (bits == 0) return;
  int32_t* to = offsets + block.first_word;
  uint64_t pending = 0;
  int64_t filled = 0;
  for (uint32_t value : values) {
    pending |= uint64_t{value} << filled;
    for (filled += bits; filled >= 32; filled -= 32, pending >>= 32) {
      *to++ = static_cast<int32_t>(static_cast<uint32_t>(pending));
    }
  }
  if (filled > 0) *to = static_cast<int32_t>(static_cast<uint32_t>(pending));
}

std::vector<uint32_t> Unpack(const ChunkLayout::Block& block, const int32_t* offsets) {
  std::vector<uint32_t> values(block.num_chunks, 0);
  const int64_t bits = block.bits;
  if (bits == 0) return values;
  const int32_t* from = offsets + block.first_word;
  uint64_t pending = 0;
  int64_t filled = 0;
  for (uint32_t& value : values) {
    if (filled < bits) {
      pending |= uint64_t{static_cast<uint32_t>(*from++)} << filled;
      filled += 32;
    }
    value = static_cast<uint32_t>(pending & ((uint64_t{1} << bits) - 1));
    pending >>= bits;
    filled -= bits;
  }
  return values;
}

GRADCOMP_PART int32_t LargestOf(const float* sums, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    largest = std::max(largest, static_cast<int32_t>(MagnitudeBits(sums[i])));
  }
  return largest;
}

// Returns the first place of the magnitude. The loop has no branches, which would be mispredicted
// in every chunk, and computes a maximum, which compilers vectorize.
GRADCOMP_PART int32_t PlaceOf(uint32_t magnitude, const float* sums, int32_t size) {
  int32_t from_end = 0;
  for (int32_t i = 0; i < size; ++i) {
    from_end = std::max(from_end, (size - i) & -int32_t{MagnitudeBits(sums[i]) == magnitude});
  }
  return size - from_end;
}

constexpr Vectorized Largest{[](const float* sums, int64_t size) GRADCOMP_INLINED {
  return LargestOf(sums, size);
}};

// Writes the place of the largest magnitude of each chunk, and returns the largest magnitude of all
// chunks.
constexpr Vectorized Choose{[](const float* sums, int64_t size, int64_t chunk_size,
                               uint32_t* chosen) GRADCOMP_INLINED {
  int32_t largest = 0;
  for (int64_t begin = 0; begin < size; begin += chunk_size) {
    const int64_t length = std::min(chunk_size, size - begin);
    const int32_t maximum = LargestOf(sums + begin, length);
    *chosen++ = static_cast<uint32_t>(PlaceOf(maximum, sums + begin, length));
    largest = std::max(largest, maximum);
  }
  return largest;
}};

// Returns the largest magnitude of the block; also chooses entries if `chosen` is given.
int32_t SelectInBlock(const ChunkLayout::Block& block, const Source& tensor, uint32_t* chosen) {
  const int64_t strip = StripChunks(block) * block.chunk_size;
  thread_local std::vector<float> sums;
  sums.resize(strip);
  int32_t largest = 0;
  for (int64_t begin = block.begin; begin < block.end; begin += strip) {
    const int64_t size = std::min(strip, block.end - begin);
    Accumulate(tensor, begin, size, sums.data());
    const int32_t of_strip = chosen ? Choose(sums.data(), size, block.chunk_size, chosen)
                                    : Largest(sums.data(), size);
    if (chosen) chosen += CeilDiv(size, block.chunk_size);
    largest = std::max(largest, of_strip);
  }
  return largest;
}

constexpr Vectorized AddTimes{[](const auto* gradient, int64_t size, float filter,
                                 float* residual) GRADCOMP_INLINED {
  for (int64_t i = 0; i < size; ++i) residual[i] += filter * ToFloat(gradient[i]);
}};

void AddFiltered(const Source& source, int64_t begin, int64_t end, float filter) {
  WithGradient(source.type, source.gradient, [&](const auto* gradient) {
    AddTimes(gradient + begin, end - begin, filter, source.residual + begin);
  });
}

uint64_t Mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

}  // namespace

ChunkLayout::ChunkLayout(const std::vector<int64_t>& sizes,
                         const std::vector<int64_t>& chunk_sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t size = sizes[i];
    const int64_t chunk_size = chunk_sizes[i];
    const int64_t bits = OffsetBits(chunk_size);
    const int64_t chunks = CeilDiv(size, chunk_size);
    tensors_.push_back({size, chunk_size, bits, chunks, num_chunks_, num_words_});
    const int64_t step = kChunksPerWords * CeilDiv(kBlockSize, kChunksPerWords * chunk_size);
    for (int64_t first = 0; first < chunks; first += step) {
      const int64_t count = std::min(step, chunks - first);
      blocks_.push_back({static_cast<int64_t>(i), first * chunk_size,
                         std::min(size, (first + count) * chunk_size), chunk_size, bits, count,
                         num_chunks_ + first, num_words_ + first * bits / 32});
    }
    num_chunks_ += chunks;
    num_words_ += CeilDiv(chunks * bits, 32);
  }
}

Status CheckChunks(const std::vector<int64_t>& chunk_sizes, int64_t num_tensors) {
  if (static_cast<int64_t>(chunk_sizes.size()) != num_tensors) {
    return {Concat("chunk_sizes has ", chunk_sizes.size(), " entries; expected ", num_tensors,
                   ": give one for each tensor")};
  }
  for (size_t i = 0; i < chunk_sizes.size(); ++i) {
    if (chunk_sizes[i] < 1 || chunk_sizes[i] > kMaxChunkSize) {
      return {Concat("chunk_sizes[", i, "] is ", chunk_sizes[i], "; expected 1 to ", kMaxChunkSize,
                     ": choose a chunk size in this range")};
    }
  }
  return {};
}

bool SelectLargest(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for, int32_t* offsets) {
  std::atomic<bool> finite{true};
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    std::vector<uint32_t> chosen(offsets ? block.num_chunks : 0);
    const int32_t largest =
        SelectInBlock(block, tensors[block.tensor], offsets ? chosen.data() : nullptr);
    if (!IsFiniteMagnitude(largest)) finite = false;
    if (offsets != nullptr) Pack(block, chosen, offsets);
  });
  return finite;
}

void DrawOffsets(const ChunkLayout& layout, uint64_t step, int32_t* offsets) {
  const uint64_t stream = Mix(Mix(0) ^ step);
  for (const ChunkLayout::Block& block : layout.blocks()) {
    std::vector<uint32_t> drawn(block.num_chunks);
    for (int64_t i = 0; i < block.num_chunks; ++i) {
      const uint64_t random = Mix(stream ^ (block.first_chunk + i)) >> 32;
      drawn[i] = random * ChunkLength(block, i) >> 32;
    }
    Pack(block, drawn, offsets);
  }
}

Status CheckOffsets(const ChunkLayout& layout, const int32_t* offsets) {
  for (const ChunkLayout::Block& block : layout.blocks()) {
    const std::vector<uint32_t> chosen = Unpack(block, offsets);
    for (int64_t i = 0; i < block.num_chunks; ++i) {
      const int64_t length = ChunkLength(block, i);
      if (chosen[i] < length) continue;
      return {Concat("tensor ", block.tensor, ": offset ", chosen[i], " in chunk ",
                     block.begin / block.chunk_size + i, "; expected one below ", length)};
    }
  }
  return {};
}

void TakeChosen(const ChunkLayout& layout, const std::vector<Source>& tensors,
                const int32_t* offsets, const ParallelFor& parallel_for, float* values) {
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    const Source& source = tensors[block.tensor];
    const std::vector<uint32_t> chosen = Unpack(block, offsets);
    WithGradient(source.type, source.gradient, [&](const auto* gradient) {
      for (int64_t i = 0; i < block.num_chunks; ++i) {
        const int64_t element = block.begin + i * block.chunk_size + chosen[i];
        values[block.first_chunk + i] = source.residual[element] + ToFloat(gradient[element]);
      }
    });
  });
}

void ApplyTotals(const ChunkLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* offsets, const float* totals, const float* rests, float filter,
                 const ParallelFor& parallel_for, const std::vector<float*>& outputs) {
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    const Source& source = tensors[block.tensor];
    float* output = outputs[block.tensor];
    const std::vector<uint32_t> chosen = Unpack(block, offsets);
    std::vector<float> kept(StripChunks(block));
    for (int64_t first = 0; first < block.num_chunks; first += kept.size()) {
      const int64_t begin = block.begin + first * block.chunk_size;
      const int64_t count = std::min<int64_t>(kept.size(), block.num_chunks - first);
      const int64_t end = std::min(block.end, begin + count * block.chunk_size);
      const int64_t chunk = block.first_chunk + first;
      const auto element = [&](int64_t i) { return begin + i * block.chunk_size + chosen[first + i]; };
      for (int64_t i = 0; i < count; ++i) {
        kept[i] = (1 - filter) * source.residual[element(i)];
        if (rests != nullptr) kept[i] += filter * rests[chunk + i];
      }
      AddFiltered(source, begin, end, filter);
      std::memset(output + begin, 0, (end - begin) * sizeof(float));
      for (int64_t i = 0; i < count; ++i) {
        source.residual[element(i)] = kept[i];
        output[element(i)] = totals[chunk + i];
      }
    }
  });
}

void KeepGradients(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   float filter, const ParallelFor& parallel_for) {
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    AddFiltered(tensors[block.tensor], block.begin, block.end, filter);
  });
}

}  // namespace gradcomp
