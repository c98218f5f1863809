#include "adacomp_on_gpu.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../kernels/adacomp_codes.h"
#include "../kernels/adacomp_layout.h"
#include "precondition_on_gpu.h"

namespace gradcomp {
namespace {

static_assert(static_cast<int>(GradientType::kFloat) == 0 &&
                  static_cast<int>(GradientType::kHalf) == 1 &&
                  static_cast<int>(GradientType::kBFloat16) == 2,
              "as in device.h");

struct Sums {
  int64_t pieces = 0;
  int64_t bins = 0;
  int64_t room_bytes = 0;
  int64_t body_words = 0;  // at most
};

gpu::EncodeTensor PlanTensor(const EncoderTensor& source, Sums* sums) {
  const Binning bins(source.size, source.bin_size);
  gpu::EncodeTensor tensor = {};
  tensor.residual = source.residual;
  tensor.second_moment = source.second_moment;
  tensor.gradient = source.gradient;
  tensor.squares = source.squares;
  tensor.adam = OnGpu(source.adam);
  tensor.gradient_type = static_cast<int>(source.type);
  tensor.sent_whole = bins.sent_whole;
  tensor.code_bytes = static_cast<int>(CodeBytes(bins.bin_size));
  tensor.size = bins.size;
  tensor.bin_size = bins.bin_size;
  tensor.num_bins = bins.num_bins;
  tensor.bins_per_block = bins.bins_per_block;
  const int64_t fitting = std::clamp<int64_t>(gpu::kPieceElements / bins.bin_size, 1,
                                              gpu::kPieceBins);
  tensor.bins_per_piece = static_cast<int>(std::min(fitting, bins.bins_per_block));
  tensor.pieces_per_block = CeilDiv(bins.bins_per_block, tensor.bins_per_piece);
  if (bins.num_blocks > 0) {
    tensor.num_pieces = (bins.num_blocks - 1) * tensor.pieces_per_block +
                        CeilDiv(bins.BlockBins(bins.num_blocks - 1), tensor.bins_per_piece);
  }
  tensor.length_words = bins.LengthWords();
  tensor.first_piece = sums->pieces;
  tensor.first_bin = sums->bins;
  tensor.first_room = sums->room_bytes;
  sums->pieces += tensor.num_pieces;
  sums->bins += tensor.num_bins;
  const int64_t code_words = CeilDiv(bins.size * tensor.code_bytes, 4);
  if (!bins.sent_whole) sums->room_bytes += 4 * code_words;
  sums->body_words +=
      kTableEntryWords + tensor.length_words + (bins.sent_whole ? bins.size : code_words);
  return tensor;
}

static_assert(gpu::kBlockElements == kBlockSize, "as in adacomp_layout.h");

// Returns the number of bins of a unit. If bins are small, a unit has a multiple of four elements,
// for vectors.
int64_t UnitBins(int64_t bin_size) {
  const int64_t fitting = std::max<int64_t>(1, gpu::kUnitElements / bin_size);
  const int64_t even = 4 / std::gcd<int64_t>(4, bin_size);
  return fitting < even ? fitting : fitting - fitting % even;
}

// Collects in device memory the payloads' spans of one block after another.
class Spans {
 public:
  Spans(const AdaCompDecoder& decoder, GpuQueue* queue) : decoder_(decoder) {
    const int32_t* first = decoder.payloads().front().words;
    const PayloadView& last = decoder.payloads().back();
    begin_ = reinterpret_cast<const uint8_t*>(first);
    on_gpu_ = static_cast<uint8_t*>(
        queue->Upload(first, 4 * (last.words + last.header.length - first)));
  }

  gpu::DecodeSpan Of(int64_t payload, int64_t tensor, int64_t block) const {
    const AdaCompDecoder::Span span = decoder_.SpanOf(payload, tensor, block);
    if (span.codes == nullptr) return {};
    return {on_gpu_ + (span.codes - begin_), static_cast<unsigned>(span.num_codes), span.scale};
  }

 private:
  const AdaCompDecoder& decoder_;
  const uint8_t* begin_;
  const uint8_t* on_gpu_;
};

}  // namespace

EncodedOnGpu EncodeAdaComp(const std::vector<EncoderTensor>& tensors, float scale_factor,
                           GpuQueue* queue) {
  Sums sums;
  std::vector<gpu::EncodeTensor> planned;
  for (const EncoderTensor& tensor : tensors) planned.push_back(PlanTensor(tensor, &sums));
  const int64_t num_tensors = planned.size();
  gpu::EncodeStep step = {};
  step.tensors = CopyToGpu(queue, planned);
  step.num_tensors = num_tensors;
  step.num_pieces = sums.pieces;
  step.not_finite = NewOnGpu<int>(queue, 1);
  queue->Zero(step.not_finite, sizeof(int));
  step.boost = scale_factor - 1;
  step.bin_max = NewOnGpu<float>(queue, sums.bins);
  step.room = NewOnGpu<unsigned char>(queue, sums.room_bytes);
  step.piece_codes = NewOnGpu<unsigned>(queue, sums.pieces);
  step.piece_sum = NewOnGpu<double>(queue, sums.pieces);
  step.piece_byte = NewOnGpu<long long>(queue, sums.pieces);
  step.scale = NewOnGpu<float>(queue, num_tensors);
  step.code_words = NewOnGpu<unsigned>(queue, num_tensors);
  step.first_word = NewOnGpu<long long>(queue, num_tensors);
  step.summary = NewOnGpu<gpu::EncodeSummary>(queue, 1);
  step.body = NewOnGpu<int>(queue, sums.body_words);
  if (sums.pieces > 0) {
    queue->Launch("gradcomp_adacomp_check", sums.pieces, &step, gpu::kScanThreads);
    queue->Launch("gradcomp_adacomp_scan", sums.pieces, &step, gpu::kScanThreads);
  }
  queue->Launch("gradcomp_adacomp_tensors", num_tensors, &step);
  queue->Launch("gradcomp_adacomp_layout", 1, &step);
  if (sums.pieces > 0) {
    queue->Launch("gradcomp_adacomp_pack", CeilDiv(sums.pieces, gpu::kWarps), &step);
  }
  return {step.summary, step.body, step};
}

void TakeBackAdaComp(const EncodedOnGpu& encoded, GpuQueue* queue) {
  const int64_t num_pieces = encoded.step.num_pieces;
  if (num_pieces == 0) return;
  queue->Launch("gradcomp_adacomp_unpack", CeilDiv(num_pieces, gpu::kWarps), &encoded.step);
}

void DecodeAdaComp(const AdaCompDecoder& decoder, const std::vector<float*>& values, bool adds,
                   GpuQueue* queue) {
  std::vector<gpu::DecodeBlock> blocks;
  for (size_t tensor = 0; tensor < values.size(); ++tensor) {
    const Binning& bins = decoder.tensors()[tensor];
    const int64_t unit_bins = UnitBins(bins.bin_size);
    for (int64_t block = 0; block < bins.num_blocks; ++block) {
      blocks.push_back({values[tensor] + bins.FirstElement(block),
                        static_cast<unsigned>(bins.BlockSize(block)),
                        static_cast<unsigned>(bins.bin_size), static_cast<unsigned>(unit_bins),
                        bins.sent_whole, static_cast<int>(CodeBytes(bins.bin_size))});
    }
  }
  if (blocks.empty()) return;
  const Spans spans(decoder, queue);
  std::vector<gpu::DecodeSpan> of_blocks;
  const int64_t num_payloads = decoder.payloads().size();
  for (int64_t payload = 0; payload < num_payloads; ++payload) {
    for (size_t tensor = 0; tensor < values.size(); ++tensor) {
      for (int64_t block = 0; block < decoder.tensors()[tensor].num_blocks; ++block) {
        of_blocks.push_back(spans.Of(payload, tensor, block));
      }
    }
  }
  gpu::DecodeStep step = {};
  step.blocks = CopyToGpu(queue, blocks);
  step.spans = CopyToGpu(queue, of_blocks);
  step.num_blocks = blocks.size();
  step.num_payloads = static_cast<int>(num_payloads);
  step.adds = adds;
  queue->Launch("gradcomp_adacomp_decode", blocks.size(), &step);
}

}  // namespace gradcomp
