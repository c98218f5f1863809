// Sums at places that one replica, the leader, has chosen for all: LGC. The leader chooses the largest
// entries of some tensors. Other tensors are summed whole.
#pragma once

#include <cstdint>
#include <vector>

#include "blocks.h"
#include "common.h"
#include "source.h"

namespace gradcomp {

// Where the places and the values of each tensor lie, one tensor behind the other.
class LeaderLayout {
 public:
  struct Tensor {
    int64_t size;     // elements
    int64_t entries;  // that are chosen; 0: it is sent whole
    int place_bits;   // that one place takes
    int64_t first_place_word;
    int64_t first_value;
  };

  LeaderLayout(const std::vector<int64_t>& sizes, const std::vector<int64_t>& entries);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Blocks& blocks() const { return blocks_; }  // of kBlockSize elements
  int64_t num_place_words() const { return num_place_words_; }
  int64_t num_values() const { return num_values_; }

 private:
  std::vector<Tensor> tensors_;
  Blocks blocks_;
  int64_t num_place_words_ = 0;
  int64_t num_values_ = 0;
};

// Where an entry of a tensor is. All places are packed, the lowest bits first, and those of each
// tensor begin with a new word.
int64_t PlaceAt(const LeaderLayout::Tensor& tensor, const int32_t* places, int64_t entry);

// One sentence on the first number of entries that no layout can have.
Status CheckEntries(const std::vector<int64_t>& sizes, const std::vector<int64_t>& entries);

// Of the entries of a tensor: by ascending value, by ascending place, or by descending magnitude;
// of equal ones, the first comes first.
enum class EntryOrder { kValue, kIndex, kMagnitude };

// Whether all of residual + gradient is finite.
bool AllSumsFinite(const LeaderLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for);

// Chooses the entries of largest magnitude of residual + gradient. Returns whether all sums are
// finite, also those of tensors that are sent whole; if not, all words of places are 0.
bool ChooseEntries(const LeaderLayout& layout, const std::vector<Source>& tensors, EntryOrder order,
                   const ParallelFor& parallel_for, int32_t* places);

// Places come from another replica: checks that each lies in its tensor.
Status CheckPlaces(const LeaderLayout& layout, const int32_t* places);

// Residual + gradient at the places, or everywhere in a tensor that is sent whole.
void TakeEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* places, const ParallelFor& parallel_for, float* values);

// The unsent parts of the first values. All other values were sent whole.
struct UnsentValues {
  const float* values;
  int64_t size;

  float At(int64_t value) const { return value < size ? values[value] : 0; }
};

// What all replicas gave is summed: outputs are the totals at the places, else zeros. A residual
// becomes the rest where its sum with the gradient was sent, and elsewhere takes the gradient.
void ApplyEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                  const int32_t* places, const float* totals, const UnsentValues& rests,
                  const ParallelFor& parallel_for, const std::vector<float*>& outputs);

// Nothing was sent: residuals take the gradient.
void KeepEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                 const ParallelFor& parallel_for);

}  // namespace gradcomp
