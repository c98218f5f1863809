// LGC's sums at places that one replica, the leader, chooses for all replicas. The leader chooses
// the largest entries of some tensors. Other tensors are summed whole.
#pragma once

#include <cstdint>
#include <vector>

#include "blocks.h"
#include "common.h"
#include "source.h"

namespace gradcomp {

// The positions of each tensor's places and values in vectors of all tensors.
class LeaderLayout {
 public:
  struct Tensor {
    int64_t size;     // elements
    int64_t entries;  // chosen entries; 0: the tensor is sent whole
    int place_bits;   // per place
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

// Returns the place of an entry of a tensor. Places are packed, the lowest bits first, and each
// tensor's places begin with a new word.
int64_t PlaceAt(const LeaderLayout::Tensor& tensor, const int32_t* places, int64_t entry);

// Describes in one sentence the first invalid number of entries.
Status CheckEntries(const std::vector<int64_t>& sizes, const std::vector<int64_t>& entries);

// The order of a tensor's entries: by ascending value, by ascending place, or by descending
// magnitude. Equal entries keep their order.
enum class EntryOrder { kValue, kIndex, kMagnitude };

// Returns whether residual + gradient is finite everywhere.
bool AllSumsFinite(const LeaderLayout& layout, const std::vector<Source>& tensors,
                   const ParallelFor& parallel_for);

// Chooses the entries with the largest magnitudes of residual + gradient. Returns whether all sums
// are finite, including tensors that are sent whole; if not, all words of places are 0.
bool ChooseEntries(const LeaderLayout& layout, const std::vector<Source>& tensors, EntryOrder order,
                   const ParallelFor& parallel_for, int32_t* places);

// Checks that each place lies in its tensor, because places come from another replica.
Status CheckPlaces(const LeaderLayout& layout, const int32_t* places);

// Writes residual + gradient at the places, and everywhere in a tensor that is sent whole.
void TakeEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                 const int32_t* places, const ParallelFor& parallel_for, float* values);

// The unsent parts of the first values. All other values were sent without an error.
struct UnsentValues {
  const float* values;
  int64_t size;

  float At(int64_t value) const { return value < size ? values[value] : 0; }
};

// Applies the sums over all replicas. Outputs are the totals at the places, and zeros elsewhere. A
// residual becomes the unsent part at the places, and adds the gradient elsewhere.
void ApplyEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                  const int32_t* places, const float* totals, const UnsentValues& rests,
                  const ParallelFor& parallel_for, const std::vector<float*>& outputs);

// Adds the gradient to the residuals, after a step in which nothing was sent.
void KeepEntries(const LeaderLayout& layout, const std::vector<Source>& tensors,
                 const ParallelFor& parallel_for);

}  // namespace gradcomp
