#include "fixed_length.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

namespace gradcomp {
namespace {

Blocks BlocksOf(const Codecs& codecs) {
  Blocks blocks;
  for (const auto& codec : codecs) blocks.AddTensor(codec->num_blocks());
  return blocks;
}

using Encoders = std::vector<std::unique_ptr<TensorEncoder>>;

Encoders NewEncoders(const Codecs& codecs, const std::vector<Source>& sources,
                     const Sender& sender, int32_t* body) {
  Encoders encoders;
  for (size_t i = 0; i < codecs.size(); ++i) {
    const Turn turn = {sender.step, sender.replica, static_cast<int64_t>(i)};
    encoders.push_back(codecs[i]->NewEncoder(sources[i], turn, body));
    body += codecs[i]->words();
  }
  return encoders;
}

// Returns whether all sums are finite.
bool Run(const Encoders& encoders, const Blocks& blocks, const ParallelFor& parallel_for) {
  int num_passes = 0;
  for (const auto& encoder : encoders) num_passes = std::max(num_passes, encoder->num_passes());
  bool finite = true;
  for (int pass = 0; pass < num_passes && finite; ++pass) {
    blocks.ForEach(parallel_for, kBlockSize, [&](int64_t tensor, int64_t block) {
      if (pass < encoders[tensor]->num_passes()) encoders[tensor]->RunBlock(pass, block);
    });
    for (const auto& encoder : encoders) {
      if (pass < encoder->num_passes()) encoder->EndPass(pass);
      finite &= encoder->finite();
    }
  }
  return finite;
}

}  // namespace

int64_t PayloadWords(const Codecs& codecs) {
  int64_t words = kHeaderWords;
  for (const auto& codec : codecs) words += codec->words();
  return words;
}

void EncodeFixedLength(const Codecs& codecs, const std::vector<Source>& sources,
                       const Sender& sender, const ParallelFor& parallel_for, int32_t* payload) {
  int32_t* body = payload + kHeaderWords;
  const Encoders encoders = NewEncoders(codecs, sources, sender, body);
  const bool finite = Run(encoders, BlocksOf(codecs), parallel_for);
  if (!finite) std::fill_n(body, PayloadWords(codecs) - kHeaderWords, 0);
  WriteFixedHeader(codecs, sender, finite, payload);
}

void WriteFixedHeader(const Codecs& codecs, const Sender& sender, bool finite, int32_t* payload) {
  PayloadHeader header;
  header.method = static_cast<uint16_t>(sender.method);
  header.fingerprint = sender.fingerprint;
  header.plan = sender.plan;
  header.step = sender.step;
  header.flags = finite ? 0 : kNonFiniteFlag;
  header.num_tensors = codecs.size();
  header.length = PayloadWords(codecs);
  WriteHeader(header, payload);
}

FixedLengthDecoder::FixedLengthDecoder(const Codecs& codecs, Method method, int64_t fingerprint,
                                       int64_t plan, ParallelFor parallel_for)
    : codecs_(codecs),
      method_(method),
      fingerprint_(fingerprint),
      plan_(plan),
      parallel_for_(std::move(parallel_for)),
      blocks_(BlocksOf(codecs)) {
  int64_t word = 0;
  for (const auto& codec : codecs) {
    first_word_.push_back(word);
    word += codec->words();
  }
}

Status FixedLengthDecoder::Read(const int32_t* words, int64_t num_payloads, int64_t row_words,
                                std::optional<int64_t> step) {
  Status status = ReadRows(words, num_payloads, row_words, &payloads_);
  if (!status.ok()) return status;
  const int64_t num_tensors = codecs_.size();
  const ExpectedHeader expected = {method_, fingerprint_, plan_, step, num_tensors,
                                   PayloadWords(codecs_)};
  status = CheckAll(parallel_for_, num_payloads, kBlockSize, [&](int64_t i) {
    const Status header = CheckHeader(payloads_[i], expected);
    return OfReplica(i, header.ok() ? CheckZeros(payloads_[i]) : header);
  });
  if (!status.ok()) return status;
  return CheckAll(parallel_for_, num_payloads * num_tensors, kBlockSize, [&](int64_t i) {
    const int64_t payload = i / num_tensors;
    const int64_t tensor = i % num_tensors;
    if (payloads_[payload].header.non_finite()) return Status();
    const Status checked = codecs_[tensor]->Check(WordsOf(payload, tensor));
    return OfReplica(payload, OfTensor(tensor, checked));
  });
}

Status FixedLengthDecoder::CheckZeros(const PayloadView& payload) const {
  if (!payload.header.non_finite()) return {};
  const int32_t* end = payload.body() + payload.body_words();
  if (std::all_of(payload.body(), end, [](int32_t word) { return word == 0; })) return {};
  return {"a word behind the header is not 0; expected zeros with the non-finite flag"};
}

bool FixedLengthDecoder::finite() const {
  return std::none_of(payloads_.begin(), payloads_.end(),
                      [](const PayloadView& payload) { return payload.header.non_finite(); });
}

bool FixedLengthDecoder::ReducesToFinite() const {
  if (!finite()) return false;
  std::atomic<bool> finite{true};
  const int64_t num_tensors = codecs_.size();
  parallel_for_(num_tensors, kBlockSize, [&](int64_t begin, int64_t end) {
    for (int64_t tensor = begin; tensor < end; ++tensor) {
      double sum = 0;
      for (size_t payload = 0; payload < payloads_.size(); ++payload) {
        sum += codecs_[tensor]->LargestMagnitude(WordsOf(payload, tensor));
      }
      // Half of the largest float leaves enough room for rounding errors.
      if (!(sum < std::numeric_limits<float>::max() / 2)) finite = false;
    }
  });
  return finite;
}

bool FixedLengthDecoder::Reduce(const std::vector<float*>& outputs) const {
  std::atomic<bool> finite{this->finite()};
  if (finite) {
    blocks_.ForEach(parallel_for_, kBlockSize, [&](int64_t tensor, int64_t block) {
      if (!ReduceBlock(tensor, block, outputs[tensor])) finite = false;
    });
  }
  if (!finite) {
    for (size_t i = 0; i < codecs_.size(); ++i) std::fill_n(outputs[i], codecs_[i]->size(), 0.0f);
  }
  return finite;
}

bool FixedLengthDecoder::ReduceBlock(int64_t tensor, int64_t block, float* output) const {
  const Codec& codec = *codecs_[tensor];
  float* values = output + codec.BlockBegin(block);
  const int64_t size = codec.BlockEnd(block) - codec.BlockBegin(block);
  std::fill_n(values, size, 0.0f);
  AddBlock(tensor, block, output);
  return AllFinite(values, size);
}

void FixedLengthDecoder::AddTo(const std::vector<float*>& values) const {
  blocks_.ForEach(parallel_for_, kBlockSize, [&](int64_t tensor, int64_t block) {
    AddBlock(tensor, block, values[tensor]);
  });
}

void FixedLengthDecoder::AddBlock(int64_t tensor, int64_t block, float* values) const {
  for (size_t payload = 0; payload < payloads_.size(); ++payload) {
    if (payloads_[payload].header.non_finite()) continue;
    codecs_[tensor]->AddBlock(WordsOf(payload, tensor), block, values);
  }
}

}  // namespace gradcomp
