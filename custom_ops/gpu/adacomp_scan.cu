// The pass over memory of AdaComp's encoding on a GPU: accumulates, and selects. With adacomp_pack.cu
// it does what kernels/adacomp_encoder.cc does, to the bit, but for the scale, whose sum has another
// order here. It may differ from the CPU's in its last bit; everything else is by the scale that is
// sent. Two launches, with a block for each piece: the first finds out whether all gradients are finite;
// if not, the second does nothing.
#include "adacomp_vectors.h"

namespace gradcomp {
namespace gpu {

constexpr int kNoBin = -1;

// Shared memory: what is known of each bin of a piece.
struct BinTable {
  unsigned* maxima;  // as magnitudes
  unsigned* ends;    // position behind the last element that is sent; 0: none is
};

// What a thread has of a tile.
struct Own {
  float accumulated[kOwn];
  unsigned boosted[kOwn];  // magnitudes
};

template <bool kUpdates>
__device__ void Load(const EncodeStep& step, const EncodeTensor& tensor, const Tile& tile, Own* own) {
  Floats added[kVectors];
  Floats moments[kVectors];
  Floats residuals[kVectors];
  for (int v = 0; v < kVectors; ++v) {  // all that is read, before anything waits for it
    added[v] = LoadGradients(tensor, tile, FirstOf(v));
    residuals[v] = LoadVector(tensor.residual, tile, FirstOf(v));
    if (tensor.second_moment) moments[v] = LoadVector(tensor.second_moment, tile, FirstOf(v));
  }
  for (int v = 0; v < kVectors; ++v) {
    if (tensor.second_moment) Divide<kUpdates>(tensor, tile, FirstOf(v), moments[v], &added[v]);
    for (int j = 0; j < kVector; ++j) {
      const float accumulated = __fadd_rn(residuals[v].at[j], added[v].at[j]);
      own->accumulated[v * kVector + j] = accumulated;
      own->boosted[v * kVector + j] =
          Magnitude(__fadd_rn(accumulated, __fmul_rn(step.boost, added[v].at[j])));
    }
  }
}

// Of the lanes of a warp, which must call it together; one bin for each, or none.
__device__ inline void RaiseMaximum(int bin, unsigned magnitude, const BinTable& table) {
  const bool is_same = bin == __shfl_sync(kAllLanes, bin, 0);
  if (__ballot_sync(kAllLanes, is_same) == kAllLanes) {
    magnitude = WarpMax(magnitude);
    if (threadIdx.x % kLanes != 0) return;
  }
  if (bin != kNoBin) atomicMax(&table.maxima[bin], magnitude);
}

__device__ inline void FindMaxima(const Tile& tile, const Own& own, const BinTable& table) {
  for (int v = 0; v < kVectors; ++v) {
    int bin = kNoBin;
    unsigned maximum = 0;
    for (int j = 0; j < kVector; ++j) {
      const int i = FirstOf(v) + j;
      if (!IsIn(tile, i)) continue;
      const int next = BinOf(tile, i);
      if (next != bin && bin != kNoBin) {
        atomicMax(&table.maxima[bin], maximum);
        maximum = 0;
      }
      bin = next;
      const unsigned magnitude = Magnitude(own.accumulated[v * kVector + j]);
      maximum = magnitude > maximum ? magnitude : maximum;
    }
    RaiseMaximum(bin, maximum, table);
  }
}

// Bits for a thread's elements.
struct Selected {
  unsigned sent;
  unsigned negative;
};

// Selects, and stores residuals, but those of bins that are not finite.
__device__ inline Selected Select(const EncodeTensor& tensor, const Tile& tile, const Own& own,
                                  const BinTable& table) {
  Selected selected = {0, 0};
  unsigned finite = 0;
  for (int k = 0; k < kOwn; ++k) {
    const int i = ElementOf(k);
    if (!IsIn(tile, i)) continue;
    const int bin = BinOf(tile, i);
    const unsigned maximum = table.maxima[bin];
    const unsigned bits = __float_as_uint(own.accumulated[k]);
    if (maximum < kInfinity) finite |= 1u << k;
    selected.negative |= bits >> 31 << k;
    if (own.boosted[k] >= maximum && Magnitude(own.accumulated[k]) != 0) {
      selected.sent |= 1u << k;
      atomicMax(&table.ends[bin], static_cast<unsigned>(PositionOf(tile, i)) + 1);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Floats values;
    for (int j = 0; j < kVector; ++j) values.at[j] = own.accumulated[v * kVector + j];
    StoreVector(values, tile, FirstOf(v), finite >> (v * kVector), tensor.residual);
  }
  return selected;
}

// The elements at which a bin begins that sends nothing: they stand for its escape.
__device__ inline unsigned Escapes(const Tile& tile, const BinTable& table) {
  unsigned escapes = 0;
  for (int k = 0; k < kOwn; ++k) {
    const int i = ElementOf(k);
    if (!IsIn(tile, i)) continue;
    const int bin = BinOf(tile, i);
    if (PositionOf(tile, i) == bin * tile.bin_size && table.ends[bin] == 0) escapes |= 1u << k;
  }
  return escapes;
}

// Where a tile's codes are written, and how.
struct CodesOfTile {
  unsigned char* codes;
  int code_bytes;
  unsigned offset;   // codes before
  int first_index;   // of the tile in its bin
  bool has_bins;     // whole ones, whose last codes are known
};

// A tile's codes, in the order of its elements; returns how many there are with those before. An
// element has one at most: what it sends, or an escape.
__device__ inline unsigned WriteCodes(const Tile& tile, const Selected& selected, unsigned escapes,
                                      const BinTable& table, const CodesOfTile& to) {
  const unsigned all = selected.sent | escapes;
  constexpr int kHigh = 16;  // bits of a count in front of that of the second vector
  static_assert(kVectors == 2 && kTileElements < 1 << kHigh, "a number has two counts");
  const unsigned of_first = __popc(all & ((1u << kVector) - 1));
  const Scanned<unsigned> scanned =
      BlockScan(of_first | static_cast<unsigned>(__popc(all >> kVector)) << kHigh);
  constexpr unsigned kLow = (1u << kHigh) - 1;
  const unsigned in_first = scanned.total & kLow;
  unsigned place = to.offset + (scanned.before & kLow);
  const unsigned second = to.offset + in_first + (scanned.before >> kHigh);
  bool is_second = false;
  for (unsigned rest = all; rest != 0; rest &= rest - 1) {
    const int k = __ffs(static_cast<int>(rest)) - 1;
    if (k >= kVector && !is_second) {
      place = second;
      is_second = true;
    }
    const int i = ElementOf(k);
    const int bin = BinOf(tile, i);
    unsigned code = EscapeIndex(to.code_bytes) << 2 | kLastInBin;
    if (selected.sent >> k & 1) {
      const int position = PositionOf(tile, i);
      const unsigned last = to.has_bins && table.ends[bin] == position + 1u;
      const unsigned index = to.first_index + position - bin * tile.bin_size;
      code = index << 2 | (selected.negative >> k & 1) * kNegative | last;
    }
    StoreCode(code, to.code_bytes, place++, to.codes);
  }
  return to.offset + in_first + (scanned.total >> kHigh);
}

// Bins that fit into a tile together.
__device__ inline unsigned ScanBins(const EncodeStep& step, const EncodeTensor& tensor,
                                    const Piece& piece, const BinTable& table,
                                    unsigned char* codes) {
  const Tile tile = TileOf(tensor, piece.begin, piece.size);
  Own own;
  Load<true>(step, tensor, tile, &own);
  FindMaxima(tile, own, table);
  __syncthreads();
  const Selected selected = Select(tensor, tile, own, table);
  if (tensor.sent_whole) return 0;
  __syncthreads();
  const unsigned escapes = Escapes(tile, table);
  return WriteCodes(tile, selected, escapes, table, {codes, tensor.code_bytes, 0, 0, true});
}

// One bin larger than a tile, which is read twice. The number returned is right on thread 0.
__device__ inline unsigned ScanLargeBin(const EncodeStep& step, const EncodeTensor& tensor,
                                        const Piece& piece, const BinTable& table,
                                        unsigned char* codes) {
  Own own;
  for (int begin = 0; begin < piece.size; begin += kPieceElements) {
    const int size = static_cast<int>(Least(kPieceElements, piece.size - begin));
    const Tile tile = TileOf(tensor, piece.begin + begin, size);
    Load<true>(step, tensor, tile, &own);
    FindMaxima(tile, own, table);
  }
  __syncthreads();
  unsigned num_codes = 0;
  for (int begin = 0; begin < piece.size; begin += kPieceElements) {
    const int size = static_cast<int>(Least(kPieceElements, piece.size - begin));
    const Tile tile = TileOf(tensor, piece.begin + begin, size);
    Load<false>(step, tensor, tile, &own);
    const Selected selected = Select(tensor, tile, own, table);
    num_codes = WriteCodes(tile, selected, 0, table,
                           {codes, tensor.code_bytes, num_codes, begin, false});
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool empty = num_codes == 0;
    const unsigned last = empty ? EscapeIndex(tensor.code_bytes) << 2
                                : LoadCode(codes, tensor.code_bytes, num_codes - 1);
    num_codes += empty;
    StoreCode(last | kLastInBin, tensor.code_bytes, num_codes - 1, codes);
  }
  return num_codes;
}

// From the last piece to the first: what is read last is still in the cache when the scan begins.
extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_check(EncodeStep step) {
  const Piece piece = FindPiece(step, step.num_pieces - 1 - blockIdx.x);
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  bool finite = true;
  for (int begin = 0; begin < piece.size; begin += kPieceElements) {
    const int size = static_cast<int>(Least(kPieceElements, piece.size - begin));
    const Tile tile = TileOf(tensor, piece.begin + begin, size);
    for (int v = 0; v < kVectors; ++v) finite = finite && AreFinite(tensor, tile, FirstOf(v));
  }
  if (!finite) atomicExch(step.not_finite, 1);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) gradcomp_adacomp_scan(EncodeStep step) {
  if (*step.not_finite) {
    if (threadIdx.x != 0) return;
    step.piece_sum[blockIdx.x] = __uint_as_float(kInfinity);
    step.piece_codes[blockIdx.x] = 0;
    return;
  }
  __shared__ unsigned maxima[kPieceBins];
  __shared__ unsigned ends[kPieceBins];
  const BinTable table = {maxima, ends};
  const Piece piece = FindPiece(step, blockIdx.x);
  for (int bin = threadIdx.x; bin < piece.num_bins; bin += kThreads) maxima[bin] = ends[bin] = 0;
  __syncthreads();
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  unsigned char* codes = step.room + tensor.first_room + piece.begin * tensor.code_bytes;
  const unsigned num_codes = tensor.bin_size > kPieceElements
                                 ? ScanLargeBin(step, tensor, piece, table, codes)
                                 : ScanBins(step, tensor, piece, table, codes);
  if (threadIdx.x >= kLanes) return;
  double sum = 0;
  for (int bin = threadIdx.x; bin < piece.num_bins; bin += kLanes) {
    const float maximum = __uint_as_float(maxima[bin]);
    step.bin_max[tensor.first_bin + piece.first_bin + bin] = maximum;
    sum = __dadd_rn(sum, maximum);
  }
  sum = WarpSum(sum);
  if (threadIdx.x == 0) {
    step.piece_sum[blockIdx.x] = sum;
    step.piece_codes[blockIdx.x] = num_codes;
  }
}

}  // namespace gpu
}  // namespace gradcomp
