// The pass over memory of AdaComp's encoding on a GPU: accumulates, and selects. With adacomp_pack.cu
// it does what kernels/adacomp_encoder.cc does, to the bit, but for the scale, whose sum has another
// order here. It may differ from the CPU's in its last bit; everything else is by the scale that is
// sent. Two launches, with a block for each piece: the first finds out whether all gradients are finite;
// if not, the second does nothing.
#include "adacomp_device.h"

namespace gradcomp {
namespace gpu {

constexpr int kUnitsPerThread = kPieceBins / kThreads;
constexpr int kRun = 128;  // elements of a bin larger than a tile that are selected as one unit
constexpr int kSmallBin = 16;  // below, a bin is a thread's and not a warp's

// A tile of residual plus gradient in shared memory, cut into units: bins, or runs of a larger bin.
struct Tile {
  float* accumulated;
  float* boosted;
  unsigned* maxima;  // of the bin that a unit is of, as magnitudes
  unsigned* places;  // of a unit's first code
  int size;          // elements
  int unit_size;
  int num_units;
  int units_are_bins;
  int first_index;  // of the tile in its bin, where units are not bins
};

template <bool kUpdates>
__device__ void Load(const EncodeStep& step, const EncodeTensor& tensor, long long begin,
                     const Tile& tile) {
  for (int i = threadIdx.x; i < tile.size; i += kThreads) {
    const float added = Addend<kUpdates>(tensor, begin + i);
    const float accumulated = __fadd_rn(tensor.residual[begin + i], added);
    tile.accumulated[i] = accumulated;
    tile.boosted[i] = __fadd_rn(accumulated, __fmul_rn(step.boost, added));
  }
  __syncthreads();
}

// kWidth threads have a unit together: the lanes of a warp, or one thread.
template <int kWidth>
__device__ void FindMaxima(const Tile& tile) {
  const int lane = threadIdx.x % kWidth;
  for (int unit = threadIdx.x / kWidth; unit < tile.num_units; unit += kThreads / kWidth) {
    const int begin = unit * tile.unit_size;
    const int end = Least(begin + tile.unit_size, tile.size);
    unsigned maximum = 0;
    for (int i = begin + lane; i < end; i += kWidth) {
      const unsigned magnitude = Magnitude(tile.accumulated[i]);
      maximum = magnitude > maximum ? magnitude : maximum;
    }
    if (kWidth == kLanes) maximum = WarpMax(maximum);
    if (lane == 0) tile.maxima[unit] = maximum;
  }
}

// Visits what a unit sends, by visit(rank, element of the tile); returns how much it is.
template <int kWidth, typename Visit>
__device__ int Select(const Tile& tile, int unit, const Visit& visit) {
  const int lane = threadIdx.x % kWidth;
  const int begin = unit * tile.unit_size;
  const int end = Least(begin + tile.unit_size, tile.size);
  const unsigned maximum = tile.maxima[unit];
  int count = 0;
  for (int first = begin; first < end; first += kWidth) {
    const int i = first + lane;
    const bool sent = i < end && Magnitude(tile.boosted[i]) >= maximum &&
                      Magnitude(tile.accumulated[i]) != 0;
    const unsigned lanes = kWidth == kLanes ? __ballot_sync(kAllLanes, sent) : sent;
    if (sent) visit(count + __popc(lanes & ((1u << lane) - 1)), i);
    count += __popc(lanes);
  }
  return count;
}

struct Nothing {
  __device__ void operator()(int, int) const {}
};

template <int kWidth>
__device__ void CountCodes(const Tile& tile) {
  for (int unit = threadIdx.x / kWidth; unit < tile.num_units; unit += kThreads / kWidth) {
    const int count = Select<kWidth>(tile, unit, Nothing());
    const bool empty_bin = count == 0 && tile.units_are_bins;  // an escape
    if (threadIdx.x % kWidth == 0) tile.places[unit] = empty_bin ? 1 : count;
  }
}

// From the numbers of codes to places; returns how many codes there are.
__device__ inline unsigned PlaceCodes(const Tile& tile) {
  __syncthreads();
  const int first = threadIdx.x * kUnitsPerThread;
  unsigned counts[kUnitsPerThread];
  unsigned sum = 0;
  for (int i = 0; i < kUnitsPerThread; ++i) {
    counts[i] = first + i < tile.num_units ? tile.places[first + i] : 0;
    sum += counts[i];
  }
  const Scanned<unsigned> scanned = BlockScan(sum);
  unsigned place = scanned.before;
  for (int i = 0; i < kUnitsPerThread; ++i) {
    if (first + i < tile.num_units) tile.places[first + i] = place;
    place += counts[i];
  }
  __syncthreads();
  return scanned.total;
}

template <int kWidth>
__device__ void WriteCodes(const Tile& tile, int code_bytes, unsigned num_codes, long long offset,
                           unsigned char* codes) {
  for (int unit = threadIdx.x / kWidth; unit < tile.num_units; unit += kThreads / kWidth) {
    const unsigned place = tile.places[unit];
    const unsigned end = unit + 1 < tile.num_units ? tile.places[unit + 1] : num_codes;
    const int first_index =
        tile.units_are_bins ? -unit * tile.unit_size : tile.first_index;
    const int count = Select<kWidth>(tile, unit, [&](int rank, int i) {
      const unsigned negative = __float_as_uint(tile.accumulated[i]) >> 30 & kNegative;
      const unsigned last = tile.units_are_bins && place + rank + 1 == end;
      StoreCode(static_cast<unsigned>(first_index + i) << 2 | negative | last, code_bytes,
                offset + place + rank, codes);
    });
    if (count == 0 && tile.units_are_bins && threadIdx.x % kWidth == 0) {
      StoreCode(EscapeIndex(code_bytes) << 2 | kLastInBin, code_bytes, offset + place, codes);
    }
  }
}

// Appends the codes of a tile to the `offset` codes before; returns how many there are now.
template <int kWidth>
__device__ unsigned AppendCodes(const Tile& tile, int code_bytes, unsigned offset,
                                unsigned char* codes) {
  CountCodes<kWidth>(tile);
  const unsigned num_codes = PlaceCodes(tile);
  WriteCodes<kWidth>(tile, code_bytes, num_codes, offset, codes);
  return offset + num_codes;
}

__device__ inline void StoreResidual(const EncodeTensor& tensor, long long begin,
                                     const Tile& tile) {
  for (int i = threadIdx.x; i < tile.size; i += kThreads) {
    if (tile.maxima[i / tile.unit_size] < kInfinity) {
      tensor.residual[begin + i] = tile.accumulated[i];
    }
  }
}

// Bins that fit into the tile together.
template <int kWidth>
__device__ unsigned ScanBins(const EncodeStep& step, const EncodeTensor& tensor,
                             const Piece& piece, Tile* tile, unsigned char* codes) {
  tile->size = piece.size;
  tile->unit_size = static_cast<int>(tensor.bin_size);
  tile->num_units = piece.num_bins;
  tile->units_are_bins = 1;
  Load<true>(step, tensor, piece.begin, *tile);
  FindMaxima<kWidth>(*tile);
  __syncthreads();
  StoreResidual(tensor, piece.begin, *tile);
  return tensor.sent_whole ? 0 : AppendCodes<kWidth>(*tile, tensor.code_bytes, 0, codes);
}

// One bin larger than a tile, which is read twice.
__device__ inline unsigned ScanLargeBin(const EncodeStep& step, const EncodeTensor& tensor,
                                        const Piece& piece, Tile* tile, unsigned char* codes) {
  unsigned maximum = 0;
  for (int i = threadIdx.x; i < piece.size; i += kThreads) {
    const float added = Addend<true>(tensor, piece.begin + i);
    const unsigned magnitude = Magnitude(__fadd_rn(tensor.residual[piece.begin + i], added));
    maximum = magnitude > maximum ? magnitude : maximum;
  }
  maximum = WarpMax(maximum);
  if (threadIdx.x % kLanes == 0) tile->places[threadIdx.x / kLanes] = maximum;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) {
    maximum = tile->places[i] > maximum ? tile->places[i] : maximum;
  }
  tile->unit_size = kRun;
  tile->units_are_bins = 0;
  for (int i = threadIdx.x; i < kTileElements / kRun; i += kThreads) tile->maxima[i] = maximum;
  unsigned num_codes = 0;
  for (int begin = 0; begin < piece.size; begin += kTileElements) {
    __syncthreads();  // the tile before has been read
    tile->size = static_cast<int>(Least(kTileElements, piece.size - begin));
    tile->num_units = (tile->size + kRun - 1) / kRun;
    tile->first_index = begin;
    Load<false>(step, tensor, piece.begin + begin, *tile);
    StoreResidual(tensor, piece.begin + begin, *tile);
    num_codes = AppendCodes<kLanes>(*tile, tensor.code_bytes, num_codes, codes);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool empty = num_codes == 0;
    const unsigned last = empty ? EscapeIndex(tensor.code_bytes) << 2
                                : LoadCode(codes, tensor.code_bytes, num_codes - 1);
    num_codes += empty;
    StoreCode(last | kLastInBin, tensor.code_bytes, num_codes - 1, codes);
  }
  return num_codes;  // right on thread 0
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_check(EncodeStep step) {
  const Piece piece = FindPiece(step, blockIdx.x);
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  bool finite = true;
  for (int i = threadIdx.x; i < piece.size; i += kThreads) {
    const float value = LoadGradient(tensor.gradient, tensor.gradient_type, piece.begin + i);
    const float square = tensor.second_moment ? Square(tensor, piece.begin + i, value) : 0;
    finite = finite && AreFinite(value, square);
  }
  if (!finite) atomicExch(step.not_finite, 1);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) gradcomp_adacomp_scan(EncodeStep step) {
  if (*step.not_finite) {
    if (threadIdx.x != 0) return;
    step.piece_sum[blockIdx.x] = __uint_as_float(kInfinity);
    step.piece_codes[blockIdx.x] = 0;
    return;
  }
  __shared__ float accumulated[kTileElements];
  __shared__ float boosted[kTileElements];
  __shared__ unsigned maxima[kPieceBins];
  __shared__ unsigned places[kPieceBins];
  Tile tile = {accumulated, boosted, maxima, places, 0, 0, 0, 0, 0};
  const Piece piece = FindPiece(step, blockIdx.x);
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  unsigned char* codes = step.room + tensor.first_room + piece.begin * tensor.code_bytes;
  unsigned num_codes;
  if (tensor.bin_size > kTileElements) {
    num_codes = ScanLargeBin(step, tensor, piece, &tile, codes);
  } else if (tensor.bin_size < kSmallBin) {
    num_codes = ScanBins<1>(step, tensor, piece, &tile, codes);
  } else {
    num_codes = ScanBins<kLanes>(step, tensor, piece, &tile, codes);
  }
  double sum = 0;
  for (int bin = threadIdx.x; bin < piece.num_bins; bin += kThreads) {
    const float maximum = __uint_as_float(maxima[bin]);
    step.bin_max[tensor.first_bin + piece.first_bin + bin] = maximum;
    sum = __dadd_rn(sum, maximum);
  }
  sum = BlockSum(sum);
  if (threadIdx.x == 0) {
    step.piece_sum[blockIdx.x] = sum;
    step.piece_codes[blockIdx.x] = num_codes;
  }
}

}  // namespace gpu
}  // namespace gradcomp
