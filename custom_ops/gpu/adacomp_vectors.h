// Reads and writes a tile of a tensor, which the threads of a block have in registers; four
// elements at a time if the arrays are aligned.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_VECTORS_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_VECTORS_H_

#include "adacomp_device.h"

namespace gradcomp::gpu {

constexpr int kVector = 4;  // consecutive elements
constexpr int kVectors = 2;  // per thread
static_assert(kPieceElements + kVector - 1 <= kVectors * kScanThreads * kVector,
              "a piece may begin anywhere");
static_assert(kPieceBins <= kVectors * kScanThreads, "of small bins, a vector has one");
static_assert(kUnitElements % kVector == 0, "a unit is made of vectors");

template <typename Value>
struct alignas(kVector * sizeof(Value)) Vector {
  Value at[kVector];
};
using Floats = Vector<float>;

// Up to kPieceElements elements, cut into vectors that begin at multiples of kVector in the tensor.
// A vector has elements of at most two bins; if bins are smaller than a vector, it has elements of
// one bin.
struct Tile {
  long long begin;      // element of the tensor
  int size;
  int before;           // places before the tile in the first vector
  int width;            // elements per vector
  int bin_size;
  unsigned reciprocal;  // 2^32 / bin_size; 0 if bin_size is 1
  bool aligned;         // whether whole vectors can be loaded and stored
};

__device__ inline Tile TileOf(const EncodeTensor& tensor, long long begin, int size) {
  const int bin_size = static_cast<int>(tensor.bin_size);
  const bool small = bin_size < kVector;
  // A null pointer counts as aligned.
  const unsigned long long addresses = reinterpret_cast<unsigned long long>(tensor.residual) |
                                       reinterpret_cast<unsigned long long>(tensor.gradient) |
                                       reinterpret_cast<unsigned long long>(tensor.second_moment) |
                                       reinterpret_cast<unsigned long long>(tensor.squares);
  return {begin,
          size,
          small ? 0 : static_cast<int>(begin % kVector),
          small ? bin_size : kVector,
          bin_size,
          ~0u / static_cast<unsigned>(bin_size) + 1,
          !small && addresses % sizeof(Floats) == 0};
}

// Returns the elements of a piece from `begin` on, as many as fit into the threads' registers.
__device__ inline Tile PartOf(const EncodeTensor& tensor, const Piece& piece, int begin) {
  const int size = static_cast<int>(Least(kPieceElements, piece.size - begin));
  return TileOf(tensor, piece.begin + begin, size);
}

constexpr unsigned kAllOfVector = (1u << kVector) - 1;

// The position of a thread's vector, and the bins of its elements, as bits.
struct Place {
  int position;    // of the first element in the tile; may be negative
  unsigned which;  // has an element
  int bin;         // of the first element
  int split;       // element at which the next bin begins; may be outside the vector
  unsigned first;  // elements of the first bin
  unsigned next;   // elements of the next bin
};

__device__ inline unsigned BitsBelow(int count) { return (1u << count) - 1; }

// Exact, because positions and bin sizes are below 2^16.
__device__ inline int BinOf(const Tile& tile, unsigned position) {
  return static_cast<int>(tile.reciprocal == 0 ? position : __umulhi(position, tile.reciprocal));
}

__device__ inline Place PlaceOf(const Tile& tile, int vector) {
  const int number = vector * kScanThreads + static_cast<int>(threadIdx.x);
  const int position = number * tile.width - tile.before;
  const int rest = tile.size - position;
  const unsigned which = BitsBelow(rest < 0 ? 0 : rest < tile.width ? rest : tile.width) &
                         ~BitsBelow(position < 0 ? -position : 0);
  const int bin = BinOf(tile, position < 0 ? 0 : position);
  const int split = (bin + 1) * tile.bin_size - position;
  const unsigned first = BitsBelow(split < kVector ? split : kVector);
  return {position, which, bin, split, which & first, which & ~first};
}

// Loads zeros where there is no element.
template <typename Value>
__device__ Vector<Value> LoadVector(const Value* values, const Tile& tile, const Place& place) {
  const Value* from = values + (tile.begin + place.position);
  if (tile.aligned && place.which == kAllOfVector) {
    return *reinterpret_cast<const Vector<Value>*>(from);
  }
  Vector<Value> loaded = {};
  for (int j = 0; j < kVector; ++j) {
    if (place.which >> j & 1) loaded.at[j] = from[j];
  }
  return loaded;
}

// Stores the elements whose bits in `which` are set.
__device__ inline void StoreVector(const Floats& stored, const Tile& tile, const Place& place,
                                   unsigned which, float* values) {
  float* to = values + (tile.begin + place.position);
  if (tile.aligned && which == kAllOfVector) {
    *reinterpret_cast<Floats*>(to) = stored;
    return;
  }
  for (int j = 0; j < kVector; ++j) {
    if (which >> j & 1) to[j] = stored.at[j];
  }
}

__device__ inline Floats LoadGradients(const EncodeTensor& tensor, const Tile& tile,
                                       const Place& place) {
  if (tensor.gradient_type == kFloat) {
    return LoadVector(static_cast<const float*>(tensor.gradient), tile, place);
  }
  const auto bits = LoadVector(static_cast<const unsigned short*>(tensor.gradient), tile, place);
  Floats gradients;
  for (int j = 0; j < kVector; ++j) gradients.at[j] = Widen(bits.at[j], tensor.gradient_type);
  return gradients;
}

__device__ inline Floats LoadSquares(const EncodeTensor& tensor, const Tile& tile,
                                     const Place& place, const Floats& gradients) {
  if (tensor.squares) return LoadVector(tensor.squares, tile, place);
  Floats squares;
  for (int j = 0; j < kVector; ++j) {
    squares.at[j] = __fmul_rn(gradients.at[j], gradients.at[j]);
  }
  return squares;
}

// Updates the second moment if kUpdates, and divides by its root.
template <bool kUpdates>
__device__ void Divide(const EncodeTensor& tensor, const Tile& tile, const Place& place,
                       Floats moments, Floats* gradients) {
  if (kUpdates) {
    const Floats squares = LoadSquares(tensor, tile, place, *gradients);
    for (int j = 0; j < kVector; ++j) {
      moments.at[j] = MovedMoment(moments.at[j], squares.at[j], tensor.adam.share);
    }
    StoreVector(moments, tile, place, place.which, tensor.second_moment);
  }
  for (int j = 0; j < kVector; ++j) {
    if (place.which >> j & 1) {
      gradients->at[j] = Quotient(gradients->at[j], moments.at[j], tensor.adam);
    }
  }
}

__device__ inline bool AreFinite(const EncodeTensor& tensor, const Tile& tile, const Place& place) {
  const Floats gradients = LoadGradients(tensor, tile, place);
  Floats squares = {};
  if (tensor.second_moment) squares = LoadSquares(tensor, tile, place, gradients);
  bool finite = true;
  for (int j = 0; j < kVector; ++j) finite &= AreFinite(gradients.at[j], squares.at[j]);
  return finite;
}

}  // namespace gradcomp::gpu

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_VECTORS_H_
