#include "adacomp_encoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "adacomp_codes.h"
#include "adacomp_layout.h"
#include "adacomp_steps.h"
#include "source.h"

namespace gradcomp {

// Bins are processed in strips. A strip's divided gradients stay in the first-level cache. Room for
// codes is reserved for a strip, because a block's worst case is far above its usual size.
constexpr int64_t kStripSize = 1 << 10;  // elements, at least a bin

// Adding less than this number to a finite float32 never gives infinity.
constexpr float kNeverOverflows = 0x1p102f;

class CodeBuffer {
 public:
  // Reserves room for more bytes, and returns the end of the codes.
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

// Consecutive whole bins of a tensor in one block.
struct AdaCompEncoder::Strip {
  int64_t begin;  // element
  int64_t size;   // elements
  int64_t first_bin;
};

struct AdaCompEncoder::Tensor {
  EncoderTensor source;
  Binning bins;
  int64_t first_block;
  int64_t first_bin;  // in bin_max_
  float scale = 0;
  int64_t code_words = 0;
  int64_t first_word = 0;  // of the tensor's codes in the body

  int64_t StripBins() const { return std::max<int64_t>(1, kStripSize / bins.bin_size); }

  template <typename StripWork>
  void ForEachStrip(int64_t block, const StripWork& work) const {
    const int64_t end = bins.FirstElement(block) + bins.BlockSize(block);
    const int64_t strip_size = StripBins() * bins.bin_size;
    for (int64_t begin = bins.FirstElement(block); begin < end; begin += strip_size) {
      work(Strip{begin, std::min(strip_size, end - begin), begin / bins.bin_size});
    }
  }

  bool InPlace() const { return source.replaced_gradient == nullptr; }
  float* NewResidual() const { return InPlace() ? source.residual : source.replaced_gradient; }

  PreconditionTensor Preconditioned(const Strip& strip, float* divided) const {
    return {source.second_moment ? source.second_moment + strip.begin : nullptr,
            GradientAt(source.type, source.gradient, strip.begin), source.type, strip.size, divided,
            source.squares ? source.squares + strip.begin : nullptr, source.adam};
  }
};

struct AdaCompEncoder::Block {
  int64_t tensor;
  int64_t index;  // index in the tensor
  CodeBuffer codes;
  int64_t first_byte = 0;  // offset of the block's codes in the tensor's codes
};

namespace {

// The values that are added to the residuals of a strip.
struct Addend {
  GradientType type;
  const void* values;
};

// Sets the gradient, which `divide` divides if there is a second moment.
template <typename Divide>
Addend ToAdd(const PreconditionTensor& tensor, const Divide& divide) {
  if (!tensor.second_moment) return {tensor.type, tensor.gradient};
  divide(tensor);
  return {GradientType::kFloat, tensor.preconditioned};
}

void Subtract(const Addend& addend, int64_t size, float* residual) {
  WithGradient(addend.type, addend.values, [&](const auto* values) {
    for (int64_t i = 0; i < size; ++i) residual[i] -= ToFloat(values[i]);
  });
}

}  // namespace

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
  tensors_.push_back({tensor, bins, first_block, num_bins_});
  num_bins_ += bins.num_bins;
  if (tensor.second_moment) {
    strip_size_ = std::max(strip_size_, tensors_.back().StripBins() * bins.bin_size);
  }
}

const AdaCompEncoder::Tensor& AdaCompEncoder::TensorOf(const Block& block) const {
  return tensors_[block.tensor];
}

template <typename BlockWork>
void AdaCompEncoder::ForEachBlock(const BlockWork& work) const {
  parallel_for_(blocks_.size(), kBlockSize, [&](int64_t begin, int64_t end) {
    const IeeeArithmetic ieee;
    const std::unique_ptr<float[]> divided(new float[strip_size_]);
    for (int64_t i = begin; i < end; ++i) work(i, divided.get());
  });
}

// A residual does not change before all sums are known to be finite, because rounding makes
// additions irreversible. Where the new residual replaces the gradient, the first pass does all but
// subtract the sent values. Elsewhere the first pass only reads. The first pass finds the maxima of
// undivided gradients, so that the second pass can subtract the sent values. Divided gradients have
// a third pass over the sent elements, which is shorter than dividing twice. Their first pass does
// not read residuals, which would take as long as reading the gradients: no step makes them infinite.
bool AdaCompEncoder::Run() {
  std::atomic<bool> finite{true};
  ForEachBlock([&](int64_t i, float* divided) {
    if (!TensorOf(blocks_[i]).InPlace()) return Send(&blocks_[i], divided);
    if (!Check(blocks_[i], divided)) finite = false;
  });
  if (!SetScales(false) || !finite) return false;
  // Goes backwards, because the blocks that the first pass has read last may still be in the cache.
  ForEachBlock([&](int64_t i, float* divided) {
    Block* block = &blocks_[blocks_.size() - 1 - i];
    const Tensor& tensor = TensorOf(*block);
    if (tensor.InPlace()) return Send(block, divided);
    AddSent(*block, -tensor.scale);
  });
  const bool were_finite = SetScales(true);
  ForEachBlock([&](int64_t i, float*) {
    const Block& block = blocks_[i];
    const Tensor& tensor = TensorOf(block);
    if (tensor.source.second_moment) AddSent(block, -tensor.scale);
  });
  if (!were_finite) {
    Rollback();
    return false;
  }
  Layout();
  return true;
}

// Sets the scales of the divided tensors, or of the other tensors. Returns whether all are finite.
bool AdaCompEncoder::SetScales(bool of_divided) {
  bool finite = true;
  for (Tensor& tensor : tensors_) {
    if ((tensor.source.second_moment != nullptr) != of_divided) continue;
    const float mean = ScaleOf(bin_max_.get() + tensor.first_bin, tensor.bins.num_bins);
    if (!std::isfinite(mean)) {
      finite = false;
    } else if (!tensor.bins.sent_whole) {
      tensor.scale = mean;
    }
  }
  return finite;
}

BinRun AdaCompEncoder::RunOf(const Tensor& tensor, const Strip& strip, const void* values) const {
  return {tensor.source.residual + strip.begin,
          values,
          tensor.NewResidual() + strip.begin,
          strip.size,
          tensor.bins.bin_size,
          bin_max_.get() + tensor.first_bin + strip.first_bin};
}

BinKernels AdaCompEncoder::Kernels(const Tensor& tensor) const {
  const bool divides = tensor.source.second_moment != nullptr;
  return FindBinKernels(simd_, divides ? GradientType::kFloat : tensor.source.type,
                        tensor.bins.bin_size);
}

// Returns whether the sums that Send computes are finite, if the residuals and second moments of
// divided gradients are; finds the maxima of undivided gradients.
bool AdaCompEncoder::Check(const Block& block, float* divided) const {
  const Tensor& tensor = TensorOf(block);
  std::vector<float> moments;
  const auto divide = [&](PreconditionTensor strip) {  // second moments do not change
    moments.assign(strip.second_moment, strip.second_moment + strip.size);
    strip.second_moment = moments.data();
    PreconditionFinite(strip);
  };
  bool finite = true;
  tensor.ForEachStrip(block.index, [&](const Strip& strip) {
    const PreconditionTensor gradient = tensor.Preconditioned(strip, divided);
    if (gradient.second_moment) {
      const float largest = LargestMagnitude(gradient);
      if (!std::isfinite(largest)) finite = false;
      if (!finite || std::max(largest, 1.0f) < kNeverOverflows * gradient.adam.epsilon) return;
    }
    const BinRun run = RunOf(tensor, strip, ToAdd(gradient, divide).values);
    Kernels(tensor).find_maxima(run);
    if (!gradient.second_moment) return;  // SetScales checks the sums
    if (!std::isfinite(ScaleOf(run.bin_max, CeilDiv(run.size, run.bin_size)))) finite = false;
  });
  return finite;
}

void AdaCompEncoder::Send(Block* block, float* divided) const {
  const Tensor& tensor = TensorOf(*block);
  const int64_t bin_size = tensor.bins.bin_size;
  tensor.ForEachStrip(block->index, [&](const Strip& strip) {
    const Addend addend = ToAdd(tensor.Preconditioned(strip, divided), PreconditionFinite);
    const BinRun run = RunOf(tensor, strip, addend.values);
    if (tensor.source.second_moment || !tensor.InPlace()) Kernels(tensor).find_maxima(run);
    if (tensor.bins.sent_whole) {
      const Source source = {tensor.source.residual + strip.begin, addend.values, addend.type};
      return Accumulate(source, 0, strip.size, run.to);
    }
    const int64_t room = (strip.size + kCodeSlack) * CodeBytes(bin_size);
    block->codes.SetEnd(
        Kernels(tensor).send(run, {boost_, tensor.scale}, block->codes.Reserve(room)));
  });
}

// Adds `scale` with the sent signs to the sent elements of a block.
void AdaCompEncoder::AddSent(const Block& block, float scale) const {
  const Tensor& tensor = TensorOf(block);
  const Binning& bins = tensor.bins;
  if (bins.sent_whole) return;
  AddCodes(block.codes.data(), bins.BlockBins(block.index), bins.bin_size, scale,
           tensor.NewResidual() + bins.FirstElement(block.index));
}

void AdaCompEncoder::Rollback() {
  ForEachBlock([&](int64_t i, float* divided) {
    const Block& block = blocks_[i];
    const Tensor& tensor = TensorOf(block);
    if (!tensor.InPlace()) return;
    AddSent(block, tensor.scale);
    tensor.ForEachStrip(block.index, [&](const Strip& strip) {
      Subtract(ToAdd(tensor.Preconditioned(strip, divided), TakeBack), strip.size,
               tensor.source.residual + strip.begin);
    });
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
  const Tensor& tensor = TensorOf(block);
  char* to = reinterpret_cast<char*>(body + tensor.first_word) + block.first_byte;
  if (!tensor.bins.sent_whole) {
    std::memcpy(to, block.codes.data(), block.codes.size());
    return;
  }
  float* residual = tensor.NewResidual() + tensor.bins.FirstElement(block.index);
  const int64_t bytes = 4 * tensor.bins.BlockSize(block.index);
  std::memcpy(to, residual, bytes);
  std::memset(residual, 0, bytes);
}

}  // namespace gradcomp
