#include "leader_selection.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>

#include "largest.h"
#include "pack_bits.h"

namespace gradcomp {
namespace {

// Calls work(tensor, begin, size) for the blocks of all tensors.
template <typename DoBlock>
void ForEachBlock(const LeaderLayout& layout, const ParallelFor& parallel_for,
                  const DoBlock& work) {
  layout.blocks().ForEach(parallel_for, kBlockSize, [&](int64_t tensor, int64_t block) {
    const int64_t begin = block * kBlockSize;
    work(tensor, begin, std::min(kBlockSize, layout.tensors()[tensor].size - begin));
  });
}

// Calls work(tensor, place, value) for each chosen entry, with its index among all values.
template <typename DoEntry>
void ForEachEntry(const LeaderLayout& layout, const int32_t* places,
                  const ParallelFor& parallel_for, const DoEntry& work) {
  const auto& tensors = layout.tensors();
  const int64_t cost = 4 * (layout.num_place_words() / tensors.size() + 1);
  parallel_for(tensors.size(), cost, [&](int64_t first, int64_t last) {
    const IeeeArithmetic ieee;
    for (int64_t i = first; i < last; ++i) {
      for (int64_t entry = 0; entry < tensors[i].entries; ++entry) {
        work(i, PlaceAt(tensors[i], places, entry), tensors[i].first_value + entry);
      }
    }
  });
}

bool BlockIsFinite(const Source& source, int64_t begin, int64_t size) {
  constexpr int64_t kStrip = 1 << 10;
  float sums[kStrip];
  for (int64_t end = begin + size; begin < end; begin += kStrip) {
    const int64_t count = std::min(kStrip, end - begin);
    Accumulate(source, begin, count, sums);
    if (!AllFinite(sums, count)) return false;
  }
  return true;
}

void Sort(EntryOrder order, std::vector<LargestEntries::Entry>* entries) {
  using Entry = LargestEntries::Entry;
  if (order == EntryOrder::kIndex) return;  // already sorted
  const auto by_value = [](const Entry& a, const Entry& b) { return a.value < b.value; };
  const auto by_magnitude = [](const Entry& a, const Entry& b) {
    return MagnitudeBits(a.value) > MagnitudeBits(b.value);
  };
  if (order == EntryOrder::kValue) {
    std::stable_sort(entries->begin(), entries->end(), by_value);
  } else {
    std::stable_sort(entries->begin(), entries->end(), by_magnitude);
  }
}

int PlaceBits(int64_t size) {
  int bits = 1;
  while (size > int64_t{1} << bits) ++bits;
  return bits;
}

void PackPlaces(const std::vector<LargestEntries::Entry>& entries, int bits, int32_t* words) {
  uint64_t pending = 0;
  int filled = 0;
  for (const auto& entry : entries) {
    pending |= static_cast<uint64_t>(entry.index) << filled;
    filled += bits;
    if (filled < 32) continue;
    *words++ = static_cast<int32_t>(pending);
    pending >>= 32;
    filled -= 32;
  }
  if (filled > 0) *words = static_cast<int32_t>(pending);
}

}  // namespace

LeaderLayout::LeaderLayout(const std::vector<int64_t>& sizes, const std::vector<int64_t>& entries) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int bits = PlaceBits(sizes[i]);
    tensors_.push_back({sizes[i], entries[i], bits, num_place_words_, num_values_});
    blocks_.AddTensor(CeilDiv(sizes[i], kBlockSize));
    num_place_words_ += PackedWords(entries[i], bits);
    num_values_ += entries[i] == 0 ? sizes[i] : entries[i];
  }
}

int64_t PlaceAt(const LeaderLayout::Tensor& tensor, const int32_t* places, int64_t entry) {
  const int64_t bit = entry * tensor.place_bits;
  const int32_t* word = places + tensor.first_place_word + bit / 32;
  const int shift = bit % 32;
  uint64_t bits = static_cast<uint32_t>(word[0]);
  if (shift + tensor.place_bits > 32) bits |= uint64_t{static_cast<uint32_t>(word[1])} << 32;
  return bits >> shift & ((uint64_t{1} << tensor.place_bits) - 1);
}

Status CheckEntries(const std::vector<int64_t>& sizes, const std::vector<int64_t>& entries) {
  if (entries.size() != sizes.size()) {
    return {Concat("entries has ", entries.size(), " numbers; expected ", sizes.size(),
                   ": give one for each tensor")};
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // a place is an int32
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (entries[i] < 0 || entries[i] > sizes[i]) {
      return {Concat("entries[", i, "] is ", entries[i], "; expected 1 to ", sizes[i],
                     ", or 0 for a tensor that is sent whole")};
    }
    if (entries[i] > 0 && sizes[i] > kMost) {
      return {Concat("tensor ", i, " has ", sizes[i], " elements; expected at most ", kMost,
                     ", or 0 entries, which sends it whole")};
    }
  }
  return {};
}

bool AllSumsFinite(const LeaderLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for) {
  std::atomic<bool> finite{true};
  ForEachBlock(layout, parallel_for, [&](int64_t tensor, int64_t begin, int64_t size) {
    if (!BlockIsFinite(tensors[tensor], begin, size)) finite = false;
  });
  return finite;
}

bool ChooseEntries(const LeaderLayout& layout, const std::vector<Source>& tensors, EntryOrder order,
                   const ParallelFor& parallel_for, int32_t* places) {
  std::vector<LargestEntries> chosen;
  Blocks blocks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const LeaderLayout::Tensor& tensor = layout.tensors()[i];
    chosen.emplace_back(tensors[i], tensor.size, tensor.entries);
    blocks.AddTensor(chosen[i].num_blocks());
  }
  constexpr int64_t kCost = LargestEntries::kBlockSize;
  std::atomic<bool> finite{true};
  blocks.ForEach(parallel_for, kCost, [&](int64_t tensor, int64_t block) {
    if (!chosen[tensor].Count(block)) finite = false;
  });
  if (!finite) {
    std::fill_n(places, layout.num_place_words(), 0);
    return false;
  }
  const auto is_chosen = [&](int64_t tensor) { return layout.tensors()[tensor].entries > 0; };
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (is_chosen(i)) chosen[i].EndCount();
  }
  blocks.ForEach(parallel_for, kCost, [&](int64_t tensor, int64_t block) {
    if (is_chosen(tensor)) chosen[tensor].Collect(block, [](int64_t, int64_t, const float*) {});
  });
  parallel_for(chosen.size(), kCost, [&](int64_t first, int64_t last) {
    const IeeeArithmetic ieee;
    for (int64_t i = first; i < last; ++i) {
      if (!is_chosen(i)) continue;
      const LeaderLayout::Tensor& tensor = layout.tensors()[i];
      std::vector<LargestEntries::Entry> entries;
      entries.reserve(tensor.entries);
      chosen[i].Finish([&](const LargestEntries::Entry& entry) { entries.push_back(entry); });
      Sort(order, &entries);
      PackPlaces(entries, tensor.place_bits, places + tensor.first_place_word);
    }
  });
  return true;
}

Status CheckPlaces(const LeaderLayout& layout, const int32_t* places) {
  for (size_t i = 0; i < layout.tensors().size(); ++i) {
    const LeaderLayout::Tensor& tensor = layout.tensors()[i];
    for (int64_t entry = 0; entry < tensor.entries; ++entry) {
      const int64_t place = PlaceAt(tensor, places, entry);
      if (place < tensor.size) continue;
      return {Concat("tensor ", i, ": place ", place, " of entry ", entry, "; expected one below ",
                     tensor.size)};
    }
    const Status padding =
        CheckPadding(places + tensor.first_place_word, tensor.entries, tensor.place_bits);
    if (!padding.ok()) return {Concat("tensor ", i, ": ", padding.message)};
  }
  return {};
}

void TakeEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* places, const ParallelFor& parallel_for, float* values) {
  ForEachBlock(layout, parallel_for, [&](int64_t i, int64_t begin, int64_t size) {
    const LeaderLayout::Tensor& tensor = layout.tensors()[i];
    if (tensor.entries == 0) {
      Accumulate(tensors[i], begin, size, values + tensor.first_value + begin);
    }
  });
  ForEachEntry(layout, places, parallel_for, [&](int64_t tensor, int64_t place, int64_t value) {
    Accumulate(tensors[tensor], place, 1, values + value);
  });
}

void ApplyEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                  const int32_t* places, const float* totals, const UnsentValues& rests,
                  const ParallelFor& parallel_for, const std::vector<float*>& outputs) {
  ForEachBlock(layout, parallel_for, [&](int64_t i, int64_t begin, int64_t size) {
    const LeaderLayout::Tensor& tensor = layout.tensors()[i];
    float* residual = tensors[i].residual + begin;
    float* output = outputs[i] + begin;
    if (tensor.entries > 0) {
      Accumulate(tensors[i], begin, size, residual);
      std::memset(output, 0, size * sizeof(float));
      return;
    }
    const int64_t first = tensor.first_value + begin;
    std::memcpy(output, totals + first, size * sizeof(float));
    for (int64_t j = 0; j < size; ++j) residual[j] = rests.At(first + j);
  });
  ForEachEntry(layout, places, parallel_for, [&](int64_t tensor, int64_t place, int64_t value) {
    outputs[tensor][place] = totals[value];
    tensors[tensor].residual[place] = rests.At(value);
  });
}

void KeepEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                 const ParallelFor& parallel_for) {
  ForEachBlock(layout, parallel_for, [&](int64_t tensor, int64_t begin, int64_t size) {
    Accumulate(tensors[tensor], begin, size, tensors[tensor].residual + begin);
  });
}

}  // namespace gradcomp
