#include "adacomp_decoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "adacomp_codes.h"
#include "floats.h"
#include "past_caches.h"

namespace gradcomp {
namespace {

Status CheckEntry(const TableEntry& entry, int64_t words_left, const Binning& bins) {
  if (entry.code_words > words_left) {
    return {Concat(entry.code_words, " words of codes; expected at most ", words_left,
                   ", which is what is left")};
  }
  const int64_t code_words = entry.code_words;
  if (bins.size == 0 && code_words > 0) {
    return {Concat(code_words, " words of codes; expected none for a tensor without elements")};
  }
  if (bins.sent_whole && code_words != bins.size) {
    return {Concat(code_words, " words; expected ", bins.size, ", one per element")};
  }
  if (bins.sent_whole ? ToBits(entry.scale) != 0 : ToBits(entry.scale) >= kInfinityBits) {
    return {Concat("scale ", entry.scale, "; expected ",
                   bins.sent_whole ? "0 for a tensor sent whole" : "a finite one, not negative")};
  }
  return {};
}

}  // namespace

struct AdaCompDecoder::Codes {
  float scale = 0;
  const uint8_t* data = nullptr;  // null: nothing was sent
  int64_t words = 0;
  std::vector<int64_t> block_bounds;  // bytes; one more than there are blocks
};

// Finds each block's codes by the lengths of all blocks but the last, which precede the codes.
Status AdaCompDecoder::ReadBlockLengths(const Binning& bins, Codes* codes) {
  codes->block_bounds.assign(1, 4 * bins.LengthWords());
  if (codes->words < bins.LengthWords()) {
    return {Concat(codes->words, " words; expected at least ", bins.LengthWords(),
                   ", the lengths of its blocks")};
  }
  int64_t end = 4 * codes->words;
  for (int64_t i = 0; i < bins.LengthWords(); ++i) {
    uint32_t length;
    std::memcpy(&length, codes->data + 4 * i, sizeof length);
    const int64_t next = codes->block_bounds.back() + length;
    if (next > end || length % CodeBytes(bins.bin_size) != 0) {
      return {Concat("block ", i, " has ", length, " bytes of codes; expected at most ",
                     end - codes->block_bounds.back(), ", whole codes")};
    }
    codes->block_bounds.push_back(next);
  }
  // Up to 3 bytes of zeros fill up the last word. No code that is the last of its bin is 0, but one
  // of 16 bits may end in a byte that is.
  const int64_t padding_begin = std::max(codes->block_bounds.back(), end - 3);
  while (end > padding_begin && codes->data[end - 1] == 0) --end;
  codes->block_bounds.push_back(end + end % CodeBytes(bins.bin_size));
  return {};
}

AdaCompDecoder::AdaCompDecoder(const std::vector<DecoderTensor>& tensors, int64_t fingerprint,
                               ParallelFor parallel_for)
    : fingerprint_(fingerprint), parallel_for_(std::move(parallel_for)) {
  std::vector<int64_t> bin_sizes;
  for (const DecoderTensor& tensor : tensors) {
    bin_sizes.push_back(tensor.bin_size);
    tensors_.emplace_back(tensor.size, tensor.bin_size);
    blocks_.AddTensor(tensors_.back().num_blocks);
  }
  plan_ = PlanOf(bin_sizes);
}

AdaCompDecoder::~AdaCompDecoder() = default;

const AdaCompDecoder::Codes& AdaCompDecoder::CodesOf(int64_t payload, int64_t tensor) const {
  return codes_[payload * tensors_.size() + tensor];
}

Status AdaCompDecoder::Read(const int32_t* words, int64_t num_payloads, int64_t row_words,
                            std::optional<int64_t> step) {
  Status status = ReadRows(words, num_payloads, row_words, &payloads_);
  if (!status.ok()) return status;
  const int64_t num_tensors = tensors_.size();
  const ExpectedHeader expected = {Method::kAdaComp, fingerprint_, plan_, step, num_tensors, {}};
  codes_.assign(num_payloads * num_tensors, Codes());
  status = CheckAll(parallel_for_, num_payloads, kBlockSize, [&](int64_t payload) {
    const Status header = CheckHeader(payloads_[payload], expected);
    return OfReplica(payload, header.ok() ? ReadTable(payload) : header);
  });
  if (!status.ok()) return status;
  status = CheckAll(parallel_for_, codes_.size(), kBlockSize, [&](int64_t i) {
    const int64_t payload = i / num_tensors;
    const int64_t tensor = i % num_tensors;
    return OfReplica(payload, OfTensor(tensor, CheckCodes(payload, tensor)));
  });
  if (!status.ok()) return status;
  finite_ = ScalesAreFinite() &&
            std::none_of(payloads_.begin(), payloads_.end(),
                         [](const PayloadView& payload) { return payload.header.non_finite(); });
  return {};
}

Status AdaCompDecoder::ReadTable(int64_t payload) {
  const PayloadView& view = payloads_[payload];
  if (view.header.non_finite()) return {};
  const int64_t num_tensors = tensors_.size();
  int64_t words_left = view.body_words() - num_tensors * kTableEntryWords;
  if (words_left < 0) {
    return {Concat(view.body_words(), " words behind the header; expected at least ",
                   num_tensors * kTableEntryWords, ", the table of ", num_tensors, " tensors")};
  }
  const int32_t* next = view.body() + num_tensors * kTableEntryWords;
  for (int64_t i = 0; i < num_tensors; ++i) {
    const TableEntry entry = EntryOf(view.body(), i);
    const Status status = CheckEntry(entry, words_left, tensors_[i]);
    if (!status.ok()) return OfTensor(i, status);
    Codes& codes = codes_[payload * num_tensors + i];
    codes.scale = entry.scale;
    codes.data = reinterpret_cast<const uint8_t*>(next);
    codes.words = entry.code_words;
    next += entry.code_words;
    words_left -= entry.code_words;
  }
  if (words_left > 0) return {Concat(words_left, " words behind the last tensor; expected none")};
  return {};
}

template <typename Code>
Status AdaCompDecoder::CheckBlock(const Binning& bins, int64_t block, const Codes& codes) {
  const int64_t begin = codes.block_bounds[block];
  const int64_t num_bins = bins.BlockBins(block);
  const CodeSpan span = {codes.data + begin,
                         (codes.block_bounds[block + 1] - begin) / int64_t{sizeof(Code)}, num_bins,
                         bins.bin_size, bins.BlockSize(block) - (num_bins - 1) * bins.bin_size};
  return gradcomp::CheckCodes<Code>(span, block * bins.bins_per_block);
}

Status AdaCompDecoder::CheckCodes(int64_t payload, int64_t tensor) {
  const Binning& bins = tensors_[tensor];
  Codes& codes = codes_[payload * tensors_.size() + tensor];
  if (codes.data == nullptr) return {};
  if (bins.sent_whole) {
    if (AllFinite(codes.data, bins.size)) return {};
    return {"a value is not finite; expected the non-finite flag with it"};
  }
  const Status status = ReadBlockLengths(bins, &codes);
  if (!status.ok()) return status;
  const auto check = CodeBytes(bins.bin_size) == 1 ? CheckBlock<Code8> : CheckBlock<Code16>;
  for (int64_t block = 0; block < bins.num_blocks; ++block) {
    const Status good = check(bins, block, codes);
    if (!good.ok()) return good;
  }
  return {};
}

bool AdaCompDecoder::ScalesAreFinite() const {
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    float sum = 0;
    for (size_t payload = 0; payload < payloads_.size(); ++payload) {
      sum += CodesOf(payload, tensor).scale;
    }
    if (!std::isfinite(sum)) return false;
  }
  return true;
}

AdaCompDecoder::Span AdaCompDecoder::SpanOf(int64_t payload, int64_t tensor,
                                            int64_t block) const {
  const Codes& codes = CodesOf(payload, tensor);
  const Binning& bins = tensors_[tensor];
  if (codes.data == nullptr) return {};
  if (bins.sent_whole) {
    return {codes.data + 4 * bins.FirstElement(block), bins.BlockSize(block), codes.scale};
  }
  const int64_t begin = codes.block_bounds[block];
  return {codes.data + begin, (codes.block_bounds[block + 1] - begin) / CodeBytes(bins.bin_size),
          codes.scale};
}

bool AdaCompDecoder::ReducesToFinite() const {
  std::atomic<bool> finite{finite_};
  blocks_.ForEach(parallel_for_, kBlockSize, [&](int64_t tensor, int64_t block) {
    if (!finite || !tensors_[tensor].sent_whole) return;
    std::vector<float> sums(tensors_[tensor].BlockSize(block));
    if (!ReduceBlock(tensor, block, sums.data())) finite = false;
  });
  return finite;
}

bool AdaCompDecoder::Reduce(const std::vector<float*>& outputs) {
  if (finite_) {
    int64_t size = 0;
    for (const Binning& bins : tensors_) size += bins.size;
    std::atomic<bool> finite{true};
    const auto reduce = [&, sums = std::vector<float>()](int64_t tensor, int64_t block) mutable {
      const Binning& bins = tensors_[tensor];
      float* output = outputs[tensor] + bins.FirstElement(block);
      if (size < kBeyondCaches) {
        if (!ReduceBlock(tensor, block, output)) finite = false;
        return;
      }
      sums.resize(std::max<int64_t>(sums.size(), bins.BlockSize(block)));
      if (!ReduceBlock(tensor, block, sums.data())) finite = false;
      CopyPastCaches(sums.data(), bins.BlockSize(block), output);
    };
    blocks_.ForEach(parallel_for_, kBlockSize, reduce);
    finite_ = finite;
  }
  if (!finite_) {
    blocks_.ForEach(parallel_for_, kBlockSize, [&](int64_t tensor, int64_t block) {
      const Binning& bins = tensors_[tensor];
      std::memset(outputs[tensor] + bins.FirstElement(block), 0, 4 * bins.BlockSize(block));
    });
  }
  return finite_;
}

bool AdaCompDecoder::ReduceBlock(int64_t tensor, int64_t block, float* sums) const {
  const Binning& bins = tensors_[tensor];
  const int64_t size = bins.BlockSize(block);
  std::memset(sums, 0, 4 * size);
  for (size_t payload = 0; payload < payloads_.size(); ++payload) {
    AddBlock(CodesOf(payload, tensor), bins, block, sums);
  }
  return !bins.sent_whole || AllFinite(sums, size);
}

void AdaCompDecoder::AddTo(const std::vector<float*>& values) {
  blocks_.ForEach(parallel_for_, kBlockSize, [&](int64_t tensor, int64_t block) {
    for (size_t payload = 0; payload < payloads_.size(); ++payload) {
      AddBlock(CodesOf(payload, tensor), tensors_[tensor], block,
               values[tensor] + tensors_[tensor].FirstElement(block));
    }
  });
}

void AdaCompDecoder::AddBlock(const Codes& codes, const Binning& bins, int64_t block,
                              float* values) const {
  if (codes.data == nullptr) return;
  if (!bins.sent_whole) {
    AddCodes(codes.data + codes.block_bounds[block], bins.BlockBins(block), bins.bin_size,
             codes.scale, values);
    return;
  }
  const uint8_t* from = codes.data + 4 * bins.FirstElement(block);
  for (int64_t i = 0; i < bins.BlockSize(block); ++i) {
    float value;
    std::memcpy(&value, from + 4 * i, sizeof value);
    values[i] += value;
  }
}

}  // namespace gradcomp
