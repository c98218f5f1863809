#include "chunks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>

namespace gradcomp {
namespace {

constexpr int64_t kStripElements = 1 << 12;  // whose sums stay in the first cache
constexpr int64_t kChunksPerWords = 32;      // so many offsets fill whole words, of any bits

int64_t OffsetBits(int64_t chunk_size) {
  int64_t bits = 0;
  while (int64_t{1} << bits < chunk_size) ++bits;
  return bits;
}

// Calls work(tensor, begin, end, at) for the parts of tensors that make up the elements
// [first, last) of a group; `at` counts from `first`.
template <typename DoPart>
void ForEachPart(const ChunkLayout::Group& group, int64_t first, int64_t last,
                 const DoPart& work) {
  const auto after = std::upper_bound(group.starts.begin(), group.starts.end(), first);
  for (int64_t i = after - group.starts.begin() - 1; first < last; ++i) {
    const int64_t end = std::min(last, group.starts[i + 1]);
    if (first < end) {
      work(group.tensors[i], first - group.starts[i], end - group.starts[i], first);
      first = end;
    }
  }
}

void ForEachBlock(const ChunkLayout& layout, const ParallelFor& parallel_for,
                  const std::function<void(const ChunkLayout::Block&)>& work) {
  parallel_for(layout.blocks().size(), kBlockSize, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    for (int64_t i = begin; i < end; ++i) work(layout.blocks()[i]);
  });
}

int64_t FirstElement(const ChunkLayout::Block& block) {
  return block.first_chunk * block.group->chunk_size;
}

int64_t LastElement(const ChunkLayout::Block& block) {
  return std::min(block.group->size,
                  (block.first_chunk + block.num_chunks) * block.group->chunk_size);
}

int64_t ChunkLength(const ChunkLayout::Group& group, int64_t chunk) {
  return std::min(group.chunk_size, group.size - chunk * group.chunk_size);
}

void Pack(const ChunkLayout::Block& block, const std::vector<uint32_t>& values, int32_t* offsets) {
  const int64_t bits = block.group->bits;
  if (bits == 0) return;
  int32_t* to = offsets + block.group->first_word + block.first_chunk * bits / 32;
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
  const int64_t bits = block.group->bits;
  if (bits == 0) return values;
  const int32_t* from = offsets + block.group->first_word + block.first_chunk * bits / 32;
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

// Where the magnitude is first. Without branches, which would be guessed wrong in every chunk, and
// as a maximum, which compilers know to do with vectors.
GRADCOMP_PART int32_t PlaceOf(uint32_t magnitude, const float* sums, int32_t size) {
  int32_t from_end = 0;
  for (int32_t i = 0; i < size; ++i) {
    from_end = std::max(from_end, (size - i) & -int32_t{MagnitudeBits(sums[i]) == magnitude});
  }
  return size - from_end;
}

GRADCOMP_VARIANTS int32_t Largest(const float* sums, int64_t size) { return LargestOf(sums, size); }

// Writes the place of the largest magnitude of each chunk, and returns the largest of all.
GRADCOMP_VARIANTS int32_t Choose(const float* sums, int64_t size, int64_t chunk_size,
                                 uint32_t* chosen) {
  int32_t largest = 0;
  for (int64_t begin = 0; begin < size; begin += chunk_size) {
    const int64_t length = std::min(chunk_size, size - begin);
    const int32_t maximum = LargestOf(sums + begin, length);
    *chosen++ = static_cast<uint32_t>(PlaceOf(maximum, sums + begin, length));
    largest = std::max(largest, maximum);
  }
  return largest;
}

// Calls work(sums, size) for strips of whole chunks: residual plus gradient, side by side even where
// a chunk spans tensors.
template <typename DoStrip>
void ForEachStrip(const ChunkLayout::Block& block, const std::vector<Source>& tensors,
                  const DoStrip& work) {
  const int64_t chunk_size = block.group->chunk_size;
  const int64_t strip = std::max<int64_t>(1, kStripElements / chunk_size) * chunk_size;
  thread_local std::vector<float> sums;
  sums.resize(strip);
  const int64_t last = LastElement(block);
  for (int64_t first = FirstElement(block); first < last; first += strip) {
    const int64_t end = std::min(last, first + strip);
    ForEachPart(*block.group, first, end,
                [&](int64_t tensor, int64_t from, int64_t to, int64_t at) {
                  Accumulate(tensors[tensor], from, to - from, sums.data() + (at - first));
                });
    work(sums.data(), end - first);
  }
}

// Returns the largest magnitude of the block, and chooses if `chosen` is given.
int32_t SelectInBlock(const ChunkLayout::Block& block, const std::vector<Source>& tensors,
                      uint32_t* chosen) {
  const int64_t chunk_size = block.group->chunk_size;
  int32_t largest = 0;
  ForEachStrip(block, tensors, [&](const float* sums, int64_t size) {
    const int32_t of_strip =
        chosen ? Choose(sums, size, chunk_size, chosen) : Largest(sums, size);
    if (chosen) chosen += CeilDiv(size, chunk_size);
    largest = std::max(largest, of_strip);
  });
  return largest;
}

// Calls work(tensor, element, chunk) for the places chosen in the chunks of a block.
template <typename DoPlace>
void ForEachChosen(const ChunkLayout::Block& block, const int32_t* offsets, const DoPlace& work) {
  const ChunkLayout::Group& group = *block.group;
  const std::vector<uint32_t> chosen = Unpack(block, offsets);
  int64_t tensor = 0;
  for (int64_t i = 0; i < block.num_chunks; ++i) {
    const int64_t chunk = block.first_chunk + i;
    const int64_t element = chunk * group.chunk_size + chosen[i];
    while (element >= group.starts[tensor + 1]) ++tensor;
    work(group.tensors[tensor], element - group.starts[tensor], group.first_chunk + chunk);
  }
}

void AddFiltered(const ChunkLayout::Block& block, const std::vector<Source>& tensors,
                 float filter) {
  ForEachPart(*block.group, FirstElement(block), LastElement(block),
              [&](int64_t tensor, int64_t from, int64_t to, int64_t) {
                const Source& source = tensors[tensor];
                float* residual = source.residual;
                WithGradient(source.type, source.gradient, [&](const auto* gradient) {
                  for (int64_t i = from; i < to; ++i) residual[i] += filter * ToFloat(gradient[i]);
                });
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
                         const std::vector<int64_t>& chunk_sizes,
                         const std::vector<int64_t>& groups) {
  std::map<int64_t, size_t> places;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto [found, is_new] = places.emplace(groups[i], groups_.size());
    if (is_new) {
      groups_.push_back({});
      groups_.back().chunk_size = chunk_sizes[i];
      groups_.back().bits = OffsetBits(chunk_sizes[i]);
    }
    Group& group = groups_[found->second];
    group.tensors.push_back(i);
    group.starts.push_back(group.size);
    group.size += sizes[i];
  }
  for (Group& group : groups_) {
    group.starts.push_back(group.size);
    group.first_chunk = num_chunks_;
    group.first_word = num_words_;
    const int64_t chunks = CeilDiv(group.size, group.chunk_size);
    num_chunks_ += chunks;
    num_words_ += CeilDiv(chunks * group.bits, 32);
    const int64_t step =
        kChunksPerWords * CeilDiv(kBlockSize, kChunksPerWords * group.chunk_size);
    for (int64_t first = 0; first < chunks; first += step) {
      blocks_.push_back({&group, first, std::min(step, chunks - first)});
    }
  }
}

Status CheckChunks(const std::vector<int64_t>& chunk_sizes, const std::vector<int64_t>& groups,
                   int64_t num_tensors) {
  for (const auto* of_all : {&chunk_sizes, &groups}) {
    if (static_cast<int64_t>(of_all->size()) != num_tensors) {
      return {Concat("chunk_sizes or groups has ", of_all->size(), " entries; expected ",
                     num_tensors, ": give one for each tensor")};
    }
  }
  std::map<int64_t, int64_t> of_groups;
  for (size_t i = 0; i < chunk_sizes.size(); ++i) {
    if (chunk_sizes[i] < 1 || chunk_sizes[i] > kMaxChunkSize) {
      return {Concat("chunk_sizes[", i, "] is ", chunk_sizes[i], "; expected 1 to ", kMaxChunkSize,
                     ": choose a chunk size in this range")};
    }
    const int64_t of_group = of_groups.emplace(groups[i], chunk_sizes[i]).first->second;
    if (chunk_sizes[i] != of_group) {
      return {Concat("chunk_sizes[", i, "] is ", chunk_sizes[i], "; expected ", of_group,
                     ", that of the others of its group")};
    }
  }
  return {};
}

bool SelectLargest(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for, int32_t* offsets) {
  std::atomic<bool> finite{true};
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    std::vector<uint32_t> chosen(offsets ? block.num_chunks : 0);
    const int32_t largest = SelectInBlock(block, tensors, offsets ? chosen.data() : nullptr);
    if (!IsFiniteMagnitude(largest)) finite = false;
    if (offsets != nullptr) Pack(block, chosen, offsets);
  });
  return finite;
}

void DrawOffsets(const ChunkLayout& layout, uint64_t seed, uint64_t step, int32_t* offsets) {
  const uint64_t stream = Mix(Mix(seed) ^ step);
  for (const ChunkLayout::Block& block : layout.blocks()) {
    std::vector<uint32_t> drawn(block.num_chunks);
    for (int64_t i = 0; i < block.num_chunks; ++i) {
      const int64_t chunk = block.first_chunk + i;
      const uint64_t random = Mix(stream ^ (block.group->first_chunk + chunk)) >> 32;
      drawn[i] = random * ChunkLength(*block.group, chunk) >> 32;
    }
    Pack(block, drawn, offsets);
  }
}

Status CheckOffsets(const ChunkLayout& layout, const int32_t* offsets) {
  for (const ChunkLayout::Block& block : layout.blocks()) {
    const std::vector<uint32_t> chosen = Unpack(block, offsets);
    for (int64_t i = 0; i < block.num_chunks; ++i) {
      const int64_t length = ChunkLength(*block.group, block.first_chunk + i);
      if (chosen[i] < length) continue;
      return {Concat("tensor ", block.group->tensors[0], ": offset ", chosen[i], " in chunk ",
                     block.first_chunk + i, "; expected one below ", length)};
    }
  }
  return {};
}

void TakeChosen(const ChunkLayout& layout, const std::vector<Source>& tensors,
                const int32_t* offsets, const ParallelFor& parallel_for, float* values) {
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    ForEachChosen(block, offsets, [&](int64_t tensor, int64_t element, int64_t chunk) {
      Accumulate(tensors[tensor], element, 1, values + chunk);
    });
  });
}

void ApplyTotals(const ChunkLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* offsets, const float* totals, const float* rests, float filter,
                 const ParallelFor& parallel_for, const std::vector<float*>& outputs) {
  ForEachBlock(layout, parallel_for, [&](const ChunkLayout::Block& block) {
    std::vector<float> kept;
    kept.reserve(block.num_chunks);
    ForEachChosen(block, offsets, [&](int64_t tensor, int64_t element, int64_t chunk) {
      kept.push_back((1 - filter) * tensors[tensor].residual[element]);
      if (rests != nullptr) kept.back() += filter * rests[chunk];
    });
    AddFiltered(block, tensors, filter);
    ForEachPart(*block.group, FirstElement(block), LastElement(block),
                [&](int64_t tensor, int64_t from, int64_t to, int64_t) {
                  std::memset(outputs[tensor] + from, 0, (to - from) * sizeof(float));
                });
    const float* next = kept.data();
    ForEachChosen(block, offsets, [&](int64_t tensor, int64_t element, int64_t chunk) {
      tensors[tensor].residual[element] = *next++;
      outputs[tensor][element] = totals[chunk];
    });
  });
}

void KeepGradients(const ChunkLayout& layout, const std::vector<Source>& tensors,
                   float filter, const ParallelFor& parallel_for) {
  ForEachBlock(layout, parallel_for,
               [&](const ChunkLayout::Block& block) { AddFiltered(block, tensors, filter); });
}

}  // namespace gradcomp
