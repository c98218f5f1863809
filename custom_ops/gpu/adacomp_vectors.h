// A tile of a tensor that the threads of a block have in their registers, and how it is read and
// written: four elements at a time, where they lie in memory so.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_VECTORS_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_VECTORS_H_

#include "adacomp_device.h"

namespace gradcomp {
namespace gpu {

constexpr int kVector = 4;  // elements that follow each other
constexpr int kVectors = kTileElements / (kThreads * kVector);  // of a thread
constexpr int kOwn = kVectors * kVector;                        // elements of a thread

template <typename Value>
struct alignas(kVector * sizeof(Value)) Vector {
  Value at[kVector];
};
using Floats = Vector<float>;

// Up to kPieceElements elements that may begin anywhere: a tile begins with the vector of the first.
struct Tile {
  long long begin;      // element of the tensor
  int first;            // element of the tile, below kVector
  int end;
  int bin_size;
  unsigned reciprocal;  // of bin_size, times 2^32; 0: of 1
  bool aligned;         // whether vectors can be read and written as such
};

__device__ inline Tile TileOf(const EncodeTensor& tensor, long long begin, int size) {
  const int first = static_cast<int>(begin % kVector);
  const unsigned bin_size = static_cast<unsigned>(tensor.bin_size);
  // Null is aligned.
  const unsigned long long addresses = reinterpret_cast<unsigned long long>(tensor.residual) |
                                       reinterpret_cast<unsigned long long>(tensor.gradient) |
                                       reinterpret_cast<unsigned long long>(tensor.second_moment) |
                                       reinterpret_cast<unsigned long long>(tensor.squares);
  return {begin - first, first, first + size, static_cast<int>(bin_size), ~0u / bin_size + 1,
          addresses % sizeof(Floats) == 0};
}

__device__ inline bool IsIn(const Tile& tile, int i) { return i >= tile.first && i < tile.end; }

// Counted from the first bin.
__device__ inline int PositionOf(const Tile& tile, int i) { return i - tile.first; }

// Exact, for positions and sizes of bins are below 2^16.
__device__ inline int BinOf(const Tile& tile, int i) {
  const int position = PositionOf(tile, i);
  if (tile.reciprocal == 0) return position;
  return static_cast<int>(__umulhi(static_cast<unsigned>(position), tile.reciprocal));
}

// The first element of a thread's vector, and any of its elements.
__device__ inline int FirstOf(int vector) {
  return (vector * kThreads + static_cast<int>(threadIdx.x)) * kVector;
}
__device__ inline int ElementOf(int k) { return FirstOf(k / kVector) + k % kVector; }

__device__ inline bool IsWhole(const Tile& tile, int first) {
  return tile.aligned && first >= tile.first && first + kVector <= tile.end;
}

// Zeros where the tile has no element.
template <typename Value>
__device__ Vector<Value> LoadVector(const Value* values, const Tile& tile, int first) {
  const Value* from = values + tile.begin + first;
  if (IsWhole(tile, first)) return *reinterpret_cast<const Vector<Value>*>(from);
  Vector<Value> loaded = {};
  for (int j = 0; j < kVector; ++j) {
    if (IsIn(tile, first + j)) loaded.at[j] = from[j];
  }
  return loaded;
}

// Those elements whose bits in `which` are set, which must be in the tile.
__device__ inline void StoreVector(const Floats& stored, const Tile& tile, int first, unsigned which,
                                   float* values) {
  float* to = values + tile.begin + first;
  constexpr unsigned kAll = (1u << kVector) - 1;
  if (tile.aligned && (which & kAll) == kAll) {
    *reinterpret_cast<Floats*>(to) = stored;
    return;
  }
  for (int j = 0; j < kVector; ++j) {
    if (which >> j & 1) to[j] = stored.at[j];
  }
}

__device__ inline Floats LoadGradients(const EncodeTensor& tensor, const Tile& tile, int first) {
  if (tensor.gradient_type == kFloat) {
    return LoadVector(static_cast<const float*>(tensor.gradient), tile, first);
  }
  const auto bits = LoadVector(static_cast<const unsigned short*>(tensor.gradient), tile, first);
  Floats gradients;
  for (int j = 0; j < kVector; ++j) gradients.at[j] = Widen(bits.at[j], tensor.gradient_type);
  return gradients;
}

__device__ inline Floats LoadSquares(const EncodeTensor& tensor, const Tile& tile, int first,
                                     const Floats& gradients) {
  if (tensor.squares) return LoadVector(tensor.squares, tile, first);
  Floats squares;
  for (int j = 0; j < kVector; ++j) {
    squares.at[j] = __fmul_rn(gradients.at[j], gradients.at[j]);
  }
  return squares;
}

// Divides by the root of the second moment, which is moved before.
template <bool kUpdates>
__device__ void Divide(const EncodeTensor& tensor, const Tile& tile, int first, Floats moments,
                       Floats* gradients) {
  if (kUpdates) {
    const Floats squares = LoadSquares(tensor, tile, first, *gradients);
    unsigned which = 0;
    for (int j = 0; j < kVector; ++j) {
      moments.at[j] = MovedMoment(moments.at[j], squares.at[j], tensor.adam.share);
      if (IsIn(tile, first + j)) which |= 1u << j;
    }
    StoreVector(moments, tile, first, which, tensor.second_moment);
  }
  for (int j = 0; j < kVector; ++j) {
    gradients->at[j] = Quotient(gradients->at[j], moments.at[j], tensor.adam);
  }
}

__device__ inline bool AreFinite(const EncodeTensor& tensor, const Tile& tile, int first) {
  const Floats gradients = LoadGradients(tensor, tile, first);
  Floats squares = {};
  if (tensor.second_moment) squares = LoadSquares(tensor, tile, first, gradients);
  bool finite = true;
  for (int j = 0; j < kVector; ++j) finite = finite && AreFinite(gradients.at[j], squares.at[j]);
  return finite;
}

}  // namespace gpu
}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_ADACOMP_VECTORS_H_
