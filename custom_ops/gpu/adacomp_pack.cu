// The second half of AdaComp's encoding on a GPU, after adacomp_scan.cu on the same stream, without
// the host in between: gradcomp_adacomp_tensors a block for each tensor scales, and where the codes
// of pieces begin gradcomp_adacomp_layout one block where those of tensors begin; the table
// gradcomp_adacomp_pack a warp for each piece writes codes, subtracts what is sent; if a sum was
// not finite, gives all back instead Where there turns out to be no memory on the host for the
// payload, one more gives all back: gradcomp_adacomp_unpack a warp for each piece
#include "adacomp_device.h"

namespace gradcomp::gpu {

constexpr int kOwnPieces = 16;   // per thread at a time, for the pieces of a tensor
constexpr int kPackedCodes = 4;  // of a lane at a time
using OwnCodes = Codes<kPackedCodes>;

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_tensors(EncodeStep step) {
  const EncodeTensor& tensor = step.tensors[blockIdx.x];
  const unsigned* piece_codes = step.piece_codes + tensor.first_piece;
  const double* piece_sum = step.piece_sum + tensor.first_piece;
  long long* piece_byte = step.piece_byte + tensor.first_piece;
  __shared__ unsigned bytes[kThreads * kOwnPieces];
  double sum = 0;
  long long byte = 4 * tensor.length_words;
  for (long long first = 0; first < tensor.num_pieces; first += kThreads * kOwnPieces) {
    const int size = static_cast<int>(Least(kThreads * kOwnPieces, tensor.num_pieces - first));
    unsigned codes[kOwnPieces] = {};
    double sums[kOwnPieces] = {};
    for (int i = 0; i < kOwnPieces; ++i) {  // issues all loads before the first use
      const int piece = i * kThreads + threadIdx.x;
      if (piece < size) codes[i] = piece_codes[first + piece];
      if (piece < size) sums[i] = piece_sum[first + piece];
    }
    for (int i = 0; i < kOwnPieces; ++i) {
      bytes[i * kThreads + threadIdx.x] = codes[i] * tensor.code_bytes;
      sum = __dadd_rn(sum, sums[i]);
    }
    __syncthreads();
    unsigned* own = bytes + threadIdx.x * kOwnPieces;
    unsigned of_own = 0;
    for (int i = 0; i < kOwnPieces; ++i) of_own += own[i];
    const Scanned<unsigned> scanned = BlockScan(of_own);
    unsigned next = scanned.before;
    for (int i = 0; i < kOwnPieces; ++i) {
      const unsigned after = next + own[i];
      own[i] = next;
      next = after;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kThreads) piece_byte[first + i] = byte + bytes[i];
    byte += scanned.total;  // a thread overwrites only bytes that it has read itself
  }
  sum = BlockSum(sum);
  if (threadIdx.x != 0) return;
  float scale = 0;
  if (tensor.num_bins > 0) {
    scale = __double2float_rn(__ddiv_rn(sum, static_cast<double>(tensor.num_bins)));
  }
  if (tensor.sent_whole && Magnitude(scale) < kInfinity) scale = 0;
  step.scale[blockIdx.x] = scale;  // not finite if a bin is not
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

// Goes from the last piece to the first, because the pieces scanned last are still in the cache.
__device__ inline long long OwnPiece(const EncodeStep& step) {
  return step.num_pieces - 1 - OwnWarp();
}

__device__ inline void PackWhole(const EncodeTensor& tensor, const Piece& piece, int* words) {
  for (int i = OwnLane(); i < piece.size; i += kLanes) {
    words[piece.begin + i] = static_cast<int>(__float_as_uint(tensor.residual[piece.begin + i]));
    tensor.residual[piece.begin + i] = 0;
  }
}

__device__ inline void PackCodes(const EncodeStep& step, const Piece& piece, long long number) {
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  const unsigned char* codes = step.room + tensor.first_room + piece.begin * tensor.code_bytes;
  int* words = step.body + step.first_word[piece.tensor];
  unsigned char* bytes = reinterpret_cast<unsigned char*>(words);
  const unsigned num_codes = step.piece_codes[number];
  const long long begin = step.piece_byte[number];
  const unsigned scale_bits = __float_as_uint(step.scale[piece.tensor]) ^ 0x80000000u;
  float* residual = tensor.residual + piece.begin;
  ForCodes<kPackedCodes>(codes, num_codes, tensor.code_bytes, [&](const OwnCodes& own) {
    for (int i = 0; i < kPackedCodes; ++i) {
      if (own.Has(i)) StoreCode(own.at[i], tensor.code_bytes, own.Number(i), bytes + begin);
    }
    AddCodes(own, tensor.code_bytes, scale_bits, tensor.bin_size, residual);
  });
  if (OwnLane() != 0) return;
  const long long block = piece.index / tensor.pieces_per_block;
  if (piece.index % tensor.pieces_per_block == 0 && block < tensor.length_words) {
    const long long next = step.piece_byte[number + tensor.pieces_per_block];
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
  for (int i = OwnLane(); i < piece.size; i += kLanes) {
    const long long element = piece.begin + i;
    const float added = TakeBack(tensor, element);
    if (Magnitude(bin_max[i / static_cast<int>(tensor.bin_size)]) < kInfinity) {
      tensor.residual[element] = __fsub_rn(tensor.residual[element], added);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_pack(EncodeStep step) {
  const long long number = OwnPiece(step);
  if (number < 0 || *step.not_finite) return;  // if not finite, nothing has changed
  const Piece piece = FindPiece(step, number);
  if (!step.summary->finite) {
    GiveBack(step, piece);
  } else if (step.tensors[piece.tensor].sent_whole) {
    PackWhole(step.tensors[piece.tensor], piece, step.body + step.first_word[piece.tensor]);
  } else {
    PackCodes(step, piece, number);
  }
}

// Reverts pack and then scan, for a payload that can't be sent.
extern "C" __global__ void __launch_bounds__(kThreads) gradcomp_adacomp_unpack(EncodeStep step) {
  const long long number = OwnPiece(step);
  if (number < 0 || !step.summary->finite) return;  // if not finite, pack has reverted everything
  const Piece piece = FindPiece(step, number);
  const EncodeTensor& tensor = step.tensors[piece.tensor];
  float* residual = tensor.residual + piece.begin;
  if (tensor.sent_whole) {
    const int* words = step.body + step.first_word[piece.tensor] + piece.begin;
    for (int i = OwnLane(); i < piece.size; i += kLanes) {
      residual[i] = __uint_as_float(static_cast<unsigned>(words[i]));
    }
  } else {
    const unsigned char* codes = step.room + tensor.first_room + piece.begin * tensor.code_bytes;
    const unsigned scale_bits = __float_as_uint(step.scale[piece.tensor]);
    ForCodes<kPackedCodes>(
        codes, step.piece_codes[number], tensor.code_bytes, [&](const OwnCodes& own) {
          AddCodes(own, tensor.code_bytes, scale_bits, tensor.bin_size, residual);
        });
  }
  __syncwarp();
  GiveBack(step, piece);
}

}  // namespace gradcomp::gpu
