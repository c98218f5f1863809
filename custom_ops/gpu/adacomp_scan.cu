// The first half of AdaComp's encoding on a GPU: accumulates and selects, in one pass over memory.
// With adacomp_pack.cu it computes the same bits as kernels/adacomp_encoder.cc, except for the
// scale: its sum has another order, so its last bit may differ. Everything else follows from the
// scale that is sent. Both launches have a block for each piece. The first launch checks whether
// all gradients are finite; if not, the second does nothing.
#include "adacomp_vectors.h"

namespace gradcomp::gpu {

constexpr int kNoBin = -1;

// In shared memory: the maximum and the end of each bin of a piece.
struct BinTable {
  unsigned* maxima;  // magnitudes as bits
  unsigned* ends;    // position after the last sent element; 0: none
};

// A thread's vectors of a tile; zeros where there is no element.
struct Own {
  Floats accumulated[kVectors];
  unsigned boosted[kVectors][kVector];  // magnitudes; 0 if the accumulated value is 0
};

template <bool kUpdates>
__device__ void Load(const EncodeStep& step, const EncodeTensor& tensor, const Tile& tile, Own* own) {
  Floats added[kVectors];
  Floats moments[kVectors];
  for (int v = 0; v < kVectors; ++v) {  // all that is read, before anything waits for it
    const Place place = PlaceOf(tile, v);
    added[v] = LoadGradients(tensor, tile, place);
    own->accumulated[v] = LoadVector(tensor.residual, tile, place);
    if (tensor.second_moment) moments[v] = LoadVector(tensor.second_moment, tile, place);
  }
  for (int v = 0; v < kVectors; ++v) {
    if (tensor.second_moment) Divide<kUpdates>(tensor, tile, PlaceOf(tile, v), moments[v], &added[v]);
    for (int j = 0; j < kVector; ++j) {
      const float addend = added[v].at[j];
      const float accumulated = __fadd_rn(own->accumulated[v].at[j], addend);
      const float boosted = __fadd_rn(accumulated, __fmul_rn(step.boost, addend));
      own->accumulated[v].at[j] = accumulated;
      own->boosted[v][j] = Magnitude(accumulated) == 0 ? 0 : Magnitude(boosted);
    }
  }
}

// Raises the maxima of the lanes' bins; a lane has one bin or none. All lanes of a warp must call
// this together.
__device__ inline void RaiseMaximum(int bin, unsigned magnitude, const BinTable& table) {
  const bool is_same = bin == __shfl_sync(kAllLanes, bin, 0);
  if (__ballot_sync(kAllLanes, is_same) == kAllLanes) {
    magnitude = WarpMax(magnitude);
    if (OwnLane() != 0) return;
  }
  if (bin != kNoBin) atomicMax(&table.maxima[bin], magnitude);
}

__device__ inline void FindMaxima(const Tile& tile, const Own& own, const BinTable& table) {
  for (int v = 0; v < kVectors; ++v) {
    const Place place = PlaceOf(tile, v);
    unsigned first = 0;
    unsigned next = 0;
    for (int j = 0; j < kVector; ++j) {
      const unsigned magnitude = Magnitude(own.accumulated[v].at[j]);
      if (j < place.split) {
        first = magnitude > first ? magnitude : first;
      } else {
        next = magnitude > next ? magnitude : next;
      }
    }
    if (place.next) atomicMax(&table.maxima[place.bin + 1], next);
    RaiseMaximum(place.first ? place.bin : kNoBin, first, table);
  }
}

__device__ inline void RaiseEnd(unsigned sent, int bin, const Place& place, const BinTable& table) {
  if (sent == 0) return;
  const int end = place.position + kLanes - __clz(static_cast<int>(sent));
  atomicMax(&table.ends[bin], static_cast<unsigned>(end));
}

// Bits for the elements of a vector.
struct Selected {
  unsigned sent;
  unsigned escapes;   // at the beginning of a bin that sends nothing: the place of its escape code
  unsigned negative;
};

// Returns the smallest boosted magnitude that is sent; zeros are never sent.
__device__ inline unsigned LeastSent(unsigned maximum) { return maximum == 0 ? 1 : maximum; }

// Selects elements, and stores the residuals except in bins that are not finite.
__device__ inline Selected Select(const EncodeTensor& tensor, const Tile& tile, const Own& own, int v,
                                  const BinTable& table) {
  const Place place = PlaceOf(tile, v);
  const unsigned of_first = place.first ? LeastSent(table.maxima[place.bin]) : kInfinity;
  const unsigned of_next = place.next ? LeastSent(table.maxima[place.bin + 1]) : kInfinity;
  unsigned sent = 0;
  unsigned negative = 0;
  for (int j = 0; j < kVector; ++j) {
    negative |= __float_as_uint(own.accumulated[v].at[j]) >> 31 << j;
    const unsigned maximum = j < place.split ? of_first : of_next;
    if (own.boosted[v][j] >= maximum) sent |= 1u << j;
  }
  sent &= place.which;
  RaiseEnd(sent & place.first, place.bin, place, table);
  RaiseEnd(sent & place.next, place.bin + 1, place, table);
  const unsigned kept =
      (of_first < kInfinity ? place.first : 0) | (of_next < kInfinity ? place.next : 0);
  StoreVector(own.accumulated[v], tile, place, kept, tensor.residual);
  return {sent, 0, negative};
}

__device__ inline unsigned EscapesOf(const Tile& tile, int v, const BinTable& table) {
  const Place place = PlaceOf(tile, v);
  const int begin = place.split - tile.bin_size;
  unsigned escapes = 0;
  if (place.first && begin >= 0 && table.ends[place.bin] == 0) escapes |= 1u << begin;
  if (place.next && table.ends[place.bin + 1] == 0) escapes |= 1u << place.split;
  return escapes;
}

// The place and the form of a tile's codes.
struct CodesOfTile {
  unsigned char* codes;
  int code_bytes;
  unsigned offset;   // codes before the tile's
  int first_index;   // index of the tile's first element in its bin
  bool has_bins;     // whether the tile has whole bins, whose last codes are known
};

// Writes the codes of a vector; `number` is the index of the first code.
__device__ inline void WriteVector(const Tile& tile, int v, const Selected& selected,
                                   const BinTable& table, const CodesOfTile& to, unsigned number) {
  const Place place = PlaceOf(tile, v);
  for (unsigned rest = selected.sent | selected.escapes; rest != 0; rest &= rest - 1) {
    const int j = __ffs(static_cast<int>(rest)) - 1;
    unsigned code = EscapeIndex(to.code_bytes) << 2 | kLastInBin;
    if (selected.sent >> j & 1) {
      const bool is_next = j >= place.split;
      const int index = to.first_index + j - place.split + (is_next ? 0 : tile.bin_size);
      const unsigned end = place.position + j + 1;
      const unsigned last = to.has_bins && table.ends[place.bin + is_next] == end;
      code = static_cast<unsigned>(index) << 2 | (selected.negative >> j & 1) * kNegative | last;
    }
    StoreCode(code, to.code_bytes, number++, to.codes);
  }
}

// Writes a tile's codes in the order of its elements; returns the number of codes so far. An
// element has at most one code: its sent sign, or an escape.
__device__ inline unsigned WriteCodes(const Tile& tile, const Selected (&selected)[kVectors],
                                      const BinTable& table, const CodesOfTile& to) {
  constexpr int kHigh = 16;  // the shift of the second vector's count
  static_assert(kVectors == 2 && kPieceElements < 1 << kHigh, "a number has two counts");
  const unsigned first = __popc(selected[0].sent | selected[0].escapes);
  const unsigned second = __popc(selected[1].sent | selected[1].escapes);
  const Scanned<unsigned> scanned = BlockScan<unsigned, kScanThreads>(first | second << kHigh);
  constexpr unsigned kLow = (1u << kHigh) - 1;
  const unsigned of_first = scanned.total & kLow;
  WriteVector(tile, 0, selected[0], table, to, to.offset + (scanned.before & kLow));
  WriteVector(tile, 1, selected[1], table, to,
              to.offset + of_first + (scanned.before >> kHigh));
  return to.offset + of_first + (scanned.total >> kHigh);
}

// Scans several bins that fit into a tile together. Reads the place of their codes late, because
// threads have few registers.
__device__ inline unsigned ScanBins(const EncodeStep& step, const EncodeTensor& tensor,
                                    const Tile& tile, const BinTable& table,
                                    unsigned char* const& codes) {
  Own own;
  Load<true>(step, tensor, tile, &own);
  FindMaxima(tile, own, table);
  __syncthreads();
  Selected selected[kVectors];
  for (int v = 0; v < kVectors; ++v) selected[v] = Select(tensor, tile, own, v, table);
  if (tensor.sent_whole) return 0;
  __syncthreads();
  for (int v = 0; v < kVectors; ++v) selected[v].escapes = EscapesOf(tile, v, table);
  return WriteCodes(tile, selected, table, {codes, tensor.code_bytes, 0, 0, true});
}

// Scans a bin larger than a tile, which is read twice. The returned number is valid on thread 0.
__device__ inline unsigned ScanLargeBin(const EncodeStep& step, const EncodeTensor& tensor,
                                        const Piece& piece, const BinTable& table,
                                        unsigned char* codes) {
  Own own;
  for (int begin = 0; begin < piece.size; begin += kPieceElements) {
    const Tile tile = PartOf(tensor, piece, begin);
    Load<true>(step, tensor, tile, &own);
    FindMaxima(tile, own, table);
  }
  __syncthreads();
  unsigned num_codes = 0;
  for (int begin = 0; begin < piece.size; begin += kPieceElements) {
    const Tile tile = PartOf(tensor, piece, begin);
    Load<false>(step, tensor, tile, &own);
    Selected selected[kVectors];
    for (int v = 0; v < kVectors; ++v) selected[v] = Select(tensor, tile, own, v, table);
    num_codes = WriteCodes(tile, selected, table,
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

// Goes from the last piece to the first, so that the pieces read last are still in the cache when
// the scan begins.
extern "C" __global__ void __launch_bounds__(kScanThreads, 8) gradcomp_adacomp_check(EncodeStep step) {
  __shared__ Piece piece;
  if (threadIdx.x < kLanes) {
    const Piece found = FindPiece(step, step.num_pieces - 1 - blockIdx.x);
    if (threadIdx.x == 0) piece = found;
  }
  __syncthreads();
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  bool finite = true;
  for (int begin = 0; begin < piece.size; begin += kPieceElements) {
    const Tile tile = PartOf(tensor, piece, begin);
    for (int v = 0; v < kVectors; ++v) finite &= AreFinite(tensor, tile, PlaceOf(tile, v));
  }
  if (!finite) atomicExch(step.not_finite, 1);
}

extern "C" __global__ void __launch_bounds__(kScanThreads, 6) gradcomp_adacomp_scan(EncodeStep step) {
  constexpr int kInVectors = kPieceBins / kVector;
  __shared__ Vector<unsigned> of_bins[2 * kInVectors];
  __shared__ Piece piece;  // shared, because threads have few registers
  __shared__ Tile tile;
  __shared__ unsigned char* codes;
  const BinTable table = {of_bins[0].at, of_bins[kInVectors].at};
  const int not_finite = *step.not_finite;
  for (int i = threadIdx.x; i < 2 * kInVectors; i += kScanThreads) of_bins[i] = {};
  if (threadIdx.x < kLanes) {
    const Piece found = FindPiece(step, blockIdx.x);
    if (threadIdx.x == 0) {
      const EncodeTensor& tensor = step.tensors[found.tensor];
      piece = found;
      tile = TileOf(tensor, found.begin, found.size);
      codes = step.room + tensor.first_room + found.begin * tensor.code_bytes;
    }
  }
  __syncthreads();
  if (not_finite) {
    if (threadIdx.x != 0) return;
    step.piece_sum[blockIdx.x] = __uint_as_float(kInfinity);
    step.piece_codes[blockIdx.x] = 0;
    return;
  }
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  const unsigned num_codes = piece.size > kPieceElements
                                 ? ScanLargeBin(step, tensor, piece, table, codes)
                                 : ScanBins(step, tensor, tile, table, codes);
  if (threadIdx.x >= kLanes) return;
  double sum = 0;
  for (int bin = threadIdx.x; bin < piece.num_bins; bin += kLanes) {
    const float maximum = __uint_as_float(table.maxima[bin]);
    step.bin_max[tensor.first_bin + piece.first_bin + bin] = maximum;
    sum = __dadd_rn(sum, maximum);
  }
  sum = WarpSum(sum);
  if (threadIdx.x == 0) {
    step.piece_sum[blockIdx.x] = sum;
    step.piece_codes[blockIdx.x] = num_codes;
  }
}

}  // namespace gradcomp::gpu
