#include "adacomp_encoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "adacomp_codes.h"
#include "adacomp_layout.h"
#include "adacomp_steps.h"

namespace gradcomp {

// Tensors are quantized a group at a time, while the group may still be in the processor's cache.
constexpr int64_t kGroupSize = 1 << 20;  // elements, at least

// Bins are scanned a strip at a time. What is made of its gradients stays in the first-level cache,
// and room for codes is made for the strip, not for the block, whose worst case is far above what is
// usual.
constexpr int64_t kScannedStrip = 1 << 10;  // elements, at least a bin

class CodeBuffer {
 public:
  // Returns the end of the codes, with room for `bytes` more.
  uint8_t* Reserve(int64_t bytes) {
    if (size_ + bytes > capacity_) Grow(std::max(2 * capacity_, size_ + bytes));
    return data_.get() + size_;
  }
  void SetEnd(const uint8_t* end) { size_ = end - data_.get(); }

  const uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  void Grow(int64_t capacity) {
    std::unique_ptr<uint8_t[]> data(new uint8_t[capacity]);
    if (size_ > 0) std::memcpy(data.get(), data_.get(), size_);
    data_ = std::move(data);
    capacity_ = capacity;
  }

  std::unique_ptr<uint8_t[]> data_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

namespace {

// Whole bins of a tensor that follow each other in one block.
struct Strip {
  int64_t begin;  // element
  int64_t size;   // elements
  int64_t first_bin;
  int64_t num_bins;
};

int64_t StripBins(const Binning& bins) {
  return std::max<int64_t>(1, kScannedStrip / bins.bin_size);
}

template <typename StripWork>
void ForEachStrip(const Binning& bins, int64_t block, const StripWork& work) {
  const int64_t end_bin = block * bins.bins_per_block + bins.BlockBins(block);
  for (int64_t bin = block * bins.bins_per_block; bin < end_bin; bin += StripBins(bins)) {
    const int64_t num_bins = std::min(StripBins(bins), end_bin - bin);
    const int64_t begin = bin * bins.bin_size;
    work(Strip{begin, std::min(num_bins * bins.bin_size, bins.size - begin), bin, num_bins});
  }
}

// What is added into the residuals of a strip.
struct Addend {
  GradientType type;
  const void* values;
};

template <typename Gradient>
void Subtract(const void* gradient, int64_t size, float* residual) {
  const Gradient* from = static_cast<const Gradient*>(gradient);
  for (int64_t i = 0; i < size; ++i) residual[i] -= ToFloat(from[i]);
}

void Subtract(GradientType type, const void* gradient, int64_t size, float* residual) {
  switch (type) {
    case GradientType::kFloat:
      return Subtract<float>(gradient, size, residual);
    case GradientType::kHalf:
      return Subtract<Half>(gradient, size, residual);
    case GradientType::kBFloat16:
      return Subtract<BFloat16>(gradient, size, residual);
  }
}

PreconditionTensor Preconditioned(const EncoderTensor& tensor, const Strip& strip, float* divided) {
  return {tensor.second_moment ? tensor.second_moment + strip.begin : nullptr,
          GradientAt(tensor.type, tensor.gradient, strip.begin), tensor.type, strip.size, divided,
          tensor.squares ? tensor.squares + strip.begin : nullptr, tensor.adam};
}

// The gradient; where there is a second moment, divided.
Addend ToAdd(const EncoderTensor& tensor, const Strip& strip, float* divided) {
  if (!tensor.second_moment) {
    return {tensor.type, GradientAt(tensor.type, tensor.gradient, strip.begin)};
  }
  PreconditionFinite(Preconditioned(tensor, strip, divided));
  return {GradientType::kFloat, divided};
}

// What ToAdd returned; gives back the second moment.
Addend TakeBack(const EncoderTensor& tensor, const Strip& strip, float* divided) {
  if (!tensor.second_moment) return ToAdd(tensor, strip, divided);
  TakeBack(Preconditioned(tensor, strip, divided));
  return {GradientType::kFloat, divided};
}

}  // namespace

struct AdaCompEncoder::Tensor {
  EncoderTensor source;
  Binning bins;
  int64_t first_block;
  int64_t first_bin;  // in bin_max_
  float scale = 0;
  int64_t code_words = 0;
  int64_t first_word = 0;  // of its codes, in the body
};

struct AdaCompEncoder::Block {
  int64_t tensor;
  int64_t index;  // in its tensor
  CodeBuffer codes;
  int64_t first_byte = 0;  // of its codes, in those of the tensor
};

AdaCompEncoder::AdaCompEncoder(const std::vector<EncoderTensor>& tensors, float scale_factor,
                               ParallelFor parallel_for, Simd simd)
    : boost_(scale_factor - 1), parallel_for_(std::move(parallel_for)), simd_(simd) {
  for (const EncoderTensor& tensor : tensors) AddTensor(tensor);
  bin_max_.reset(new float[num_bins_]);
}

AdaCompEncoder::~AdaCompEncoder() = default;

void AdaCompEncoder::AddTensor(const EncoderTensor& tensor) {
  const Binning bins(tensor.size, tensor.bin_size);
  const int64_t first_block = blocks_.size();
  for (int64_t i = 0; i < bins.num_blocks; ++i) {
    Block block;
    block.tensor = tensors_.size();
    block.index = i;
    blocks_.push_back(std::move(block));
  }
  if (tensor.second_moment) {
    strip_size_ = std::max(strip_size_, StripBins(bins) * bins.bin_size);
  }
  tensors_.push_back({tensor, bins, first_block, num_bins_});
  num_bins_ += bins.num_bins;
}

bool AdaCompEncoder::Run() {
  if (!GradientsAreFinite()) return false;
  const int64_t num_tensors = tensors_.size();
  for (int64_t first = 0; first < num_tensors;) {
    const int64_t last = GroupEnd(first);
    if (!RunGroup(first, last)) {
      Rollback();
      return false;
    }
    first = last;
  }
  RunGroup(num_tensors, num_tensors);
  Layout();
  return true;
}

// A pass of its own, before anything is changed: what gradients many times larger than all before have
// been added to cannot be had back to the bit.
bool AdaCompEncoder::GradientsAreFinite() const {
  std::atomic<bool> finite{true};
  parallel_for_(blocks_.size(), kBlockSize, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tensor& tensor = tensors_[blocks_[i].tensor];
      const Strip block{tensor.bins.FirstElement(blocks_[i].index),
                        tensor.bins.BlockSize(blocks_[i].index), 0, 0};
      if (!IsFinite(Preconditioned(tensor.source, block, nullptr))) finite = false;
    }
  });
  return finite;
}

int64_t AdaCompEncoder::GroupEnd(int64_t first_tensor) const {
  const int64_t num_tensors = tensors_.size();
  int64_t end = first_tensor;
  for (int64_t size = 0; end < num_tensors && size < kGroupSize; ++end) {
    size += tensors_[end].bins.size;
  }
  return end;
}

// Quantizes the group before and scans this one, as one parallel loop.
bool AdaCompEncoder::RunGroup(int64_t first_tensor, int64_t last_tensor) {
  const int64_t num_tensors = tensors_.size();
  const int64_t num_blocks = blocks_.size();
  const int64_t scan_end = last_tensor < num_tensors ? tensors_[last_tensor].first_block : num_blocks;
  const int64_t quantize_end = scanned_;
  const int64_t to_quantize = quantize_end - quantized_;
  const int64_t to_scan = scan_end - scanned_;
  parallel_for_(to_quantize + to_scan, kBlockSize, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    const auto divided = NewStrip();
    for (int64_t i = begin; i < end; ++i) {
      if (i < to_quantize) {
        const Block& block = blocks_[quantized_ + i];
        AddSent(block, -tensors_[block.tensor].scale);
      } else {
        Scan(&blocks_[quantize_end + i - to_quantize], divided.get());
      }
    }
  });
  quantized_ = quantize_end;
  scanned_ = scan_end;
  bool finite = true;
  for (int64_t i = first_tensor; i < last_tensor; ++i) finite &= ComputeScale(&tensors_[i]);
  return finite;
}

std::unique_ptr<float[]> AdaCompEncoder::NewStrip() const {
  return std::unique_ptr<float[]>(new float[strip_size_]);
}

void AdaCompEncoder::Scan(Block* block, float* divided) const {
  const Tensor& tensor = tensors_[block->tensor];
  const Binning& bins = tensor.bins;
  ForEachStrip(bins, block->index, [&](const Strip& strip) {
    const Addend addend = ToAdd(tensor.source, strip, divided);
    BinRun run;
    run.residual = tensor.source.residual + strip.begin;
    run.gradient = addend.values;
    run.size = strip.size;
    run.bin_size = bins.bin_size;
    run.boost = boost_;
    run.bin_max = bin_max_.get() + tensor.first_bin + strip.first_bin;
    if (bins.sent_whole) return ScanDense(addend.type, run);
    const ScanBins scan_bins = FindScanBins(simd_, addend.type, bins.bin_size);
    const int64_t room = (strip.size + kCodeSlack) * CodeBytes(bins.bin_size);
    block->codes.SetEnd(scan_bins(run, block->codes.Reserve(room)));
  });
}

bool AdaCompEncoder::ComputeScale(Tensor* tensor) const {
  const float mean = ScaleOf(bin_max_.get() + tensor->first_bin, tensor->bins.num_bins);
  if (!tensor->bins.sent_whole) tensor->scale = mean;
  return std::isfinite(mean);
}

void AdaCompEncoder::AddSent(const Block& block, float scale) const {
  const Tensor& tensor = tensors_[block.tensor];
  if (tensor.bins.sent_whole) return;
  AddCodes(block.codes.data(), tensor.bins.BlockBins(block.index), tensor.bins.bin_size, scale,
           tensor.source.residual + tensor.bins.FirstElement(block.index));
}

void AdaCompEncoder::Rollback() {
  parallel_for_(scanned_, kBlockSize, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    const auto divided = NewStrip();
    for (int64_t i = begin; i < end; ++i) {
      const Block& block = blocks_[i];
      if (i < quantized_) AddSent(block, tensors_[block.tensor].scale);
      SubtractAdded(block, divided.get());
    }
  });
  scanned_ = quantized_ = body_words_ = 0;
}

void AdaCompEncoder::SubtractAdded(const Block& block, float* divided) const {
  const Tensor& tensor = tensors_[block.tensor];
  const Binning& bins = tensor.bins;
  ForEachStrip(bins, block.index, [&](const Strip& strip) {
    const Addend addend = TakeBack(tensor.source, strip, divided);
    for (int64_t i = 0; i < strip.num_bins; ++i) {
      // Scanning left a bin that is not finite as it was.
      if (!std::isfinite(bin_max_[tensor.first_bin + strip.first_bin + i])) continue;
      const int64_t first = i * bins.bin_size;
      Subtract(addend.type, GradientAt(addend.type, addend.values, first),
               std::min(bins.bin_size, strip.size - first),
               tensor.source.residual + strip.begin + first);
    }
  });
}

void AdaCompEncoder::Layout() {
  int64_t word = static_cast<int64_t>(tensors_.size()) * kTableEntryWords;
  for (Tensor& tensor : tensors_) {
    int64_t bytes = 4 * tensor.bins.LengthWords();
    for (int64_t i = 0; i < tensor.bins.num_blocks; ++i) {
      Block& block = blocks_[tensor.first_block + i];
      block.first_byte = bytes;
      bytes += tensor.bins.sent_whole ? 4 * tensor.bins.BlockSize(i) : block.codes.size();
    }
    tensor.first_word = word;
    tensor.code_words = CeilDiv(bytes, 4);
    word += tensor.code_words;
  }
  body_words_ = word;
}

void AdaCompEncoder::WriteBody(int32_t* body) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    const TableEntry entry = {tensor.scale, static_cast<uint32_t>(tensor.code_words)};
    std::memcpy(body + i * kTableEntryWords, &entry, sizeof entry);
    if (tensor.code_words > 0) body[tensor.first_word + tensor.code_words - 1] = 0;  // padding
    for (int64_t j = 0; j < tensor.bins.LengthWords(); ++j) {
      body[tensor.first_word + j] =
          static_cast<int32_t>(blocks_[tensor.first_block + j].codes.size());
    }
  }
  parallel_for_(blocks_.size(), kBlockSize / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) WriteBlock(blocks_[i], body);
  });
}

void AdaCompEncoder::WriteBlock(const Block& block, int32_t* body) const {
  const Tensor& tensor = tensors_[block.tensor];
  char* to = reinterpret_cast<char*>(body + tensor.first_word) + block.first_byte;
  if (!tensor.bins.sent_whole) {
    std::memcpy(to, block.codes.data(), block.codes.size());
    return;
  }
  float* residual = tensor.source.residual + tensor.bins.FirstElement(block.index);
  const int64_t bytes = 4 * tensor.bins.BlockSize(block.index);
  std::memcpy(to, residual, bytes);
  std::memset(residual, 0, bytes);
}

}  // namespace gradcomp
