// AdaComp on a GPU: what kernels/adacomp_encoder.cc and adacomp_decoder.cc do, to the bit, but for the
// scale, whose sum has another order here. It may differ from the CPU's in its last bit; everything
// else is by the scale that is sent. Layout: docs/payload_format.md.
//
// Encoding is four launches on one stream, and needs nothing from the host in between:
//   gradcomp_adacomp_scan     a block for each piece   the pass over memory: accumulate, select
//   gradcomp_adacomp_tensors  a block for each tensor  scales, and where the codes of pieces begin
//   gradcomp_adacomp_layout   one block                where those of tensors begin; the table
//   gradcomp_adacomp_pack     a block for each piece   writes codes, subtracts what is sent; if not all
//                                                      was finite, gives everything back instead
// Where there turns out to be no memory on the host for the payload, one more gives all back:
//   gradcomp_adacomp_unpack   a block for each piece
// Decoding is one, with a block for each block of the payload format, of spans that were checked.
#include "adacomp_tables.h"
#include "device.h"

namespace gradcomp {
namespace gpu {

constexpr int kUnitsPerThread = kPieceBins / kThreads;
constexpr int kRun = 128;  // elements of a bin larger than a tile that are selected as one unit
constexpr int kCodesPerThread = 4;
constexpr int kSmallBin = 16;  // below, a bin is a thread's and not a warp's

constexpr unsigned kNegative = 2;
constexpr unsigned kLastInBin = 1;

__device__ inline unsigned EscapeIndex(int code_bytes) { return code_bytes == 1 ? 63 : 16383; }

__device__ inline unsigned LoadCode(const unsigned char* codes, int code_bytes, long long i) {
  if (code_bytes == 1) return codes[i];
  // A payload has codes of two bytes at even places only.
  return reinterpret_cast<const unsigned short*>(codes)[i];
}

__device__ inline void StoreCode(unsigned code, int code_bytes, long long i, unsigned char* codes) {
  if (code_bytes == 1) {
    codes[i] = static_cast<unsigned char>(code);
  } else {
    reinterpret_cast<unsigned short*>(codes)[i] = static_cast<unsigned short>(code);
  }
}

// Whole bins of a tensor that follow each other in one block of it.
struct Piece {
  long long tensor;
  long long index;  // in its tensor
  long long first_bin;
  long long begin;  // element
  int num_bins;
  int size;  // elements
};

__device__ inline long long Least(long long a, long long b) { return a < b ? a : b; }

__device__ inline Piece FindPiece(const EncodeStep& step, long long piece) {
  const long long first =
      LastUpTo(step.tensors, step.num_tensors, &EncodeTensor::first_piece, piece);
  const EncodeTensor& tensor = step.tensors[first];
  const long long index = piece - tensor.first_piece;
  const long long block = index / tensor.pieces_per_block;
  const long long first_bin = block * tensor.bins_per_block +
                              index % tensor.pieces_per_block * tensor.bins_per_piece;
  const long long end_bin = Least(tensor.num_bins, (block + 1) * tensor.bins_per_block);
  const long long num_bins = Least(tensor.bins_per_piece, end_bin - first_bin);
  const long long begin = first_bin * tensor.bin_size;
  return {first, index, first_bin, begin, static_cast<int>(num_bins),
          static_cast<int>(Least(num_bins * tensor.bin_size, tensor.size - begin))};
}

__device__ inline float Square(const EncodeTensor& tensor, long long i, float value) {
  return tensor.squares ? tensor.squares[i] : __fmul_rn(value, value);
}

// What is added to a residual: the gradient; where there is a second moment, divided. That is NaN where
// it or its square is not finite, so that the bin is left as it is.
template <bool kUpdates>
__device__ float Addend(const EncodeStep& step, const EncodeTensor& tensor, long long i) {
  const float value = LoadGradient(tensor.gradient, tensor.gradient_type, i);
  if (!tensor.second_moment) return value;
  const float square = Square(tensor, i, value);
  if (!AreFinite(value, square)) return __uint_as_float(kQuietNaN);
  float moment = tensor.second_moment[i];
  if (kUpdates) {
    moment = MovedMoment(moment, square, step.share);
    tensor.second_moment[i] = moment;
  }
  return Quotient(value, moment, step.moment_scale, step.epsilon);
}

// What Addend<true> returned; gives back the second moment.
__device__ inline float TakeBack(const EncodeStep& step, const EncodeTensor& tensor, long long i) {
  const float added = Addend<false>(step, tensor, i);
  const float value = LoadGradient(tensor.gradient, tensor.gradient_type, i);
  const float square = Square(tensor, i, value);
  if (tensor.second_moment && AreFinite(value, square)) {
    const float moment = tensor.second_moment[i];
    const float rounding = __fmul_rn(__uint_as_float(0x35000000u), moment);  // 2^-21
    const float share = __fmul_rn(step.share, square);
    const float before = __fsub_rn(__fsub_rn(moment, share), rounding);
    tensor.second_moment[i] = __fdiv_rn(0 < before ? before : 0.0f, step.decay);
  }
  return added;
}

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
    const float added = Addend<kUpdates>(step, tensor, begin + i);
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
    const float added = Addend<true>(step, tensor, piece.begin + i);
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

extern "C" __global__ void __launch_bounds__(kThreads, 2) gradcomp_adacomp_scan(EncodeStep step) {
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

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_tensors(EncodeStep step) {
  const EncodeTensor& tensor = step.tensors[blockIdx.x];
  double sum = 0;
  long long byte = 4 * tensor.length_words;
  for (long long first = 0; first < tensor.num_pieces; first += kThreads) {
    const bool is_one = first + threadIdx.x < tensor.num_pieces;
    const long long piece = tensor.first_piece + first + threadIdx.x;
    const unsigned bytes = is_one ? step.piece_codes[piece] * tensor.code_bytes : 0;
    const Scanned<unsigned> scanned = BlockScan(bytes);
    if (is_one) {
      step.piece_byte[piece] = byte + scanned.before;
      sum = __dadd_rn(sum, step.piece_sum[piece]);
    }
    byte += scanned.total;
  }
  sum = BlockSum(sum);
  if (threadIdx.x != 0) return;
  float scale = 0;
  if (tensor.num_bins > 0) {
    scale = __double2float_rn(__ddiv_rn(sum, static_cast<double>(tensor.num_bins)));
  }
  if (tensor.sent_whole && Magnitude(scale) < kInfinity) scale = 0;
  step.scale[blockIdx.x] = scale;  // infinite or NaN: so is a bin
  step.code_words[blockIdx.x] =
      static_cast<unsigned>(tensor.sent_whole ? tensor.size : (byte + 3) / 4);
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_layout(EncodeStep step) {
  long long word = 2 * step.num_tensors;
  long long num_bad = 0;
  for (long long first = 0; first < step.num_tensors; first += kThreads) {
    const long long tensor = first + threadIdx.x;
    const bool is_one = tensor < step.num_tensors;
    const Scanned<long long> words = BlockScan<long long>(is_one ? step.code_words[tensor] : 0);
    const bool bad = is_one && Magnitude(step.scale[tensor]) >= kInfinity;
    num_bad += BlockScan<int>(bad).total;
    if (is_one) {
      step.first_word[tensor] = word + words.before;
      step.body[2 * tensor] = static_cast<int>(__float_as_uint(step.scale[tensor]));
      step.body[2 * tensor + 1] = static_cast<int>(step.code_words[tensor]);
    }
    word += words.total;
  }
  if (threadIdx.x != 0) return;
  step.summary->finite = num_bad == 0;
  step.summary->body_words = num_bad == 0 ? word : 0;
}

// Visits the codes of whole bins, by visit(number, code, bin). All threads must call it together.
template <typename Visit>
__device__ void ForEachCode(const unsigned char* codes, unsigned num_codes, int code_bytes,
                            const Visit& visit) {
  unsigned bin = 0;
  for (unsigned first = 0; first < num_codes; first += kThreads * kCodesPerThread) {
    const unsigned begin = first + threadIdx.x * kCodesPerThread;
    unsigned own[kCodesPerThread];
    unsigned ends = 0;
    for (int i = 0; i < kCodesPerThread; ++i) {
      own[i] = begin + i < num_codes ? LoadCode(codes, code_bytes, begin + i) : 0;
      ends += own[i] & kLastInBin;
    }
    const Scanned<unsigned> scanned = BlockScan(ends);
    unsigned own_bin = bin + scanned.before;
    for (int i = 0; i < kCodesPerThread; ++i) {
      if (begin + i < num_codes) visit(begin + i, own[i], own_bin);
      own_bin += own[i] & kLastInBin;
    }
    bin += scanned.total;
  }
}

// Adds scale * sign where a code says so. No two codes of a payload are of the same element.
__device__ inline void AddCode(unsigned code, int code_bytes, unsigned scale_bits, float* bin) {
  const unsigned index = code >> 2;
  if (index == EscapeIndex(code_bytes)) return;
  bin[index] = __fadd_rn(bin[index], __uint_as_float(scale_bits ^ (code & kNegative) << 30));
}

__device__ inline void PackWhole(const EncodeTensor& tensor, const Piece& piece, int* words) {
  for (int i = threadIdx.x; i < piece.size; i += kThreads) {
    words[piece.begin + i] = static_cast<int>(__float_as_uint(tensor.residual[piece.begin + i]));
    tensor.residual[piece.begin + i] = 0;
  }
}

__device__ inline void PackCodes(const EncodeStep& step, const Piece& piece) {
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  const unsigned char* codes = step.room + tensor.first_room + piece.begin * tensor.code_bytes;
  int* words = step.body + step.first_word[piece.tensor];
  unsigned char* bytes = reinterpret_cast<unsigned char*>(words);
  const unsigned num_codes = step.piece_codes[blockIdx.x];
  const long long begin = step.piece_byte[blockIdx.x];
  const unsigned scale_bits = __float_as_uint(step.scale[piece.tensor]) ^ 0x80000000u;
  float* residual = tensor.residual + piece.begin;
  ForEachCode(codes, num_codes, tensor.code_bytes, [&](unsigned i, unsigned code, unsigned bin) {
    StoreCode(code, tensor.code_bytes, i, bytes + begin);
    AddCode(code, tensor.code_bytes, scale_bits, residual + bin * tensor.bin_size);
  });
  if (threadIdx.x != 0) return;
  const long long block = piece.index / tensor.pieces_per_block;
  if (piece.index % tensor.pieces_per_block == 0 && block < tensor.length_words) {
    const long long next = step.piece_byte[blockIdx.x + tensor.pieces_per_block];
    words[block] = static_cast<int>(next - begin);
  }
  if (piece.index == tensor.num_pieces - 1) {
    const long long end = 4LL * step.code_words[piece.tensor];
    for (long long i = begin + num_codes * tensor.code_bytes; i < end; ++i) bytes[i] = 0;
  }
}

__device__ inline void GiveBack(const EncodeStep& step, const Piece& piece) {
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  const float* bin_max = step.bin_max + tensor.first_bin + piece.first_bin;
  for (int i = threadIdx.x; i < piece.size; i += kThreads) {
    const long long element = piece.begin + i;
    const float added = TakeBack(step, tensor, element);
    if (Magnitude(bin_max[i / static_cast<int>(tensor.bin_size)]) < kInfinity) {
      tensor.residual[element] = __fsub_rn(tensor.residual[element], added);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_pack(EncodeStep step) {
  const Piece piece = FindPiece(step, blockIdx.x);
  if (!step.summary->finite) {
    GiveBack(step, piece);
  } else if (step.tensors[piece.tensor].sent_whole) {
    PackWhole(step.tensors[piece.tensor], piece, step.body + step.first_word[piece.tensor]);
  } else {
    PackCodes(step, piece);
  }
}

// What pack did, and then what scan did, for a payload that can't be sent.
extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_unpack(EncodeStep step) {
  if (!step.summary->finite) return;  // pack has given all back
  const Piece piece = FindPiece(step, blockIdx.x);
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  float* residual = tensor.residual + piece.begin;
  if (tensor.sent_whole) {
    const int* words = step.body + step.first_word[piece.tensor] + piece.begin;
    for (int i = threadIdx.x; i < piece.size; i += kThreads) {
      residual[i] = __uint_as_float(static_cast<unsigned>(words[i]));
    }
  } else {
    const unsigned char* codes = step.room + tensor.first_room + piece.begin * tensor.code_bytes;
    const unsigned scale_bits = __float_as_uint(step.scale[piece.tensor]);
    ForEachCode(codes, step.piece_codes[blockIdx.x], tensor.code_bytes,
                [&](unsigned, unsigned code, unsigned bin) {
                  AddCode(code, tensor.code_bytes, scale_bits, residual + bin * tensor.bin_size);
                });
  }
  __syncthreads();
  GiveBack(step, piece);
}

__device__ inline void DecodeWhole(const DecodeStep& step, const DecodeBlock& block) {
  for (unsigned i = threadIdx.x; i < block.size; i += kThreads) {
    float sum = step.adds ? block.values[i] : 0.0f;
    for (int payload = 0; payload < step.num_payloads; ++payload) {
      const DecodeSpan& span = step.spans[payload * step.num_blocks + blockIdx.x];
      if (span.codes) sum = __fadd_rn(sum, reinterpret_cast<const float*>(span.codes)[i]);
    }
    block.values[i] = sum;
  }
}

__device__ inline void DecodeCodes(const DecodeStep& step, const DecodeBlock& block) {
  if (!step.adds) {
    for (unsigned i = threadIdx.x; i < block.size; i += kThreads) block.values[i] = 0;
  }
  for (int payload = 0; payload < step.num_payloads; ++payload) {
    // The barriers of ForEachCode keep sums in the order of the payloads.
    const DecodeSpan& span = step.spans[payload * step.num_blocks + blockIdx.x];
    const unsigned scale_bits = __float_as_uint(span.scale);
    ForEachCode(span.codes, span.num_codes, block.code_bytes,
                [&](unsigned, unsigned code, unsigned bin) {
                  AddCode(code, block.code_bytes, scale_bits, block.values + bin * block.bin_size);
                });
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_decode(DecodeStep step) {
  const DecodeBlock& block = step.blocks[blockIdx.x];
  if (block.sent_whole) {
    DecodeWhole(step, block);
  } else {
    DecodeCodes(step, block);
  }
}

}  // namespace gpu
}  // namespace gradcomp
