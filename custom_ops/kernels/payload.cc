#include "payload.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace gradcomp {
namespace {

uint64_t Mix(uint64_t hash, uint64_t word) {
  const uint64_t mixed = hash ^ word;
  return (mixed << 31 | mixed >> 33) * 0x9e3779b97f4a7c15u;
}

// Every step is a bijection of the hash for a fixed word, and of the word for a fixed hash. A
// change of one word therefore always changes the result.
class Checksum {
 public:
  void Add(const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    constexpr int kRound = 8 * kLanes;
    for (; bytes >= kRound && next_ == 0; bytes -= kRound, from += kRound) {
      for (int lane = 0; lane < kLanes; ++lane) MixIn(lane, from + 8 * lane, 8);
    }
    for (; bytes > 0; bytes -= 8, from += 8) {
      MixIn(next_, from, std::min<int64_t>(bytes, 8));
      next_ = (next_ + 1) % kLanes;
    }
  }

  uint64_t Result() const {
    uint64_t hash = 0;
    for (uint64_t lane : lanes_) hash = Mix(hash, lane);
    return hash;
  }

 private:
  static constexpr int kLanes = 4;  // independent, so that their multiplications overlap

  void MixIn(int lane, const char* from, int64_t bytes) {
    uint64_t word = 0;
    std::memcpy(&word, from, bytes);
    lanes_[lane] = Mix(lanes_[lane], word);
  }

  uint64_t lanes_[kLanes] = {1, 2, 3, 4};
  int next_ = 0;
};

// Returns the checksum of the body, followed by the header up to the checksum.
uint64_t ChecksumOf(const PayloadHeader& header, const int32_t* body) {
  Checksum checksum;
  checksum.Add(body, (header.length - kHeaderWords) * int64_t{sizeof(int32_t)});
  checksum.Add(&header, offsetof(PayloadHeader, checksum));
  return checksum.Result();
}

Status CheckFraming(const PayloadHeader& header, int64_t available) {
  if (header.magic != kPayloadMagic) {
    return {Concat("it starts with ", header.magic, "; expected ", kPayloadMagic,
                   " (\"TFGC\"), the start of a payload")};
  }
  if (header.version != kPayloadVersion) {
    return {Concat("format version ", header.version, "; expected ", kPayloadVersion,
                   "; install the same version of tf_gradcomp on all workers")};
  }
  if (header.length < kHeaderWords || header.length > available) {
    return {Concat("length of ", header.length, " words; expected ", kHeaderWords, " to ",
                   available, " words, the received length")};
  }
  return {};
}

}  // namespace

int64_t PlanOf(const std::vector<int64_t>& settings) {
  Checksum checksum;
  checksum.Add(settings.data(), settings.size() * sizeof(int64_t));
  return static_cast<int64_t>(checksum.Result());
}

void WriteHeader(PayloadHeader header, int32_t* payload) {
  header.checksum = ChecksumOf(header, payload + kHeaderWords);
  std::memcpy(payload, &header, sizeof header);
}

Status ReadRows(const int32_t* words, int64_t num_payloads, int64_t row_words,
                std::vector<PayloadView>* payloads) {
  payloads->clear();
  for (int64_t replica = 0; replica < num_payloads; ++replica, words += row_words) {
    if (row_words < kHeaderWords) {
      return OfReplica(replica, {Concat("only ", row_words, " words; expected a header of ",
                                        kHeaderWords, " words")});
    }
    PayloadView payload;
    payload.words = words;
    std::memcpy(static_cast<void*>(&payload.header), words, sizeof payload.header);
    const int64_t length = payload.header.length;
    const Status status = CheckFraming(payload.header, row_words);
    if (!status.ok()) return OfReplica(replica, status);
    if (std::any_of(words + length, words + row_words, [](int32_t word) { return word != 0; })) {
      return OfReplica(replica, {Concat("other words than zeros behind the ", length,
                                        " of the payload; expected nothing else in its row")});
    }
    payloads->push_back(payload);
  }
  return {};
}

Status CheckHeader(const PayloadView& payload, const ExpectedHeader& expected) {
  const PayloadHeader& header = payload.header;
  if (header.checksum != ChecksumOf(header, payload.body())) {
    return {"the checksum does not fit the content; expected a payload as it was encoded: it was "
            "changed on the way"};
  }
  if (header.method != static_cast<uint16_t>(expected.method)) {
    return {Concat("compression method ", header.method, "; expected ",
                   static_cast<uint16_t>(expected.method),
                   "; give all workers the same compressor")};
  }
  if (header.fingerprint != expected.fingerprint) {
    return {Concat("fingerprint ", header.fingerprint, "; expected ", expected.fingerprint,
                   ": replicas were built with different variables, compressor settings or "
                   "versions of tf_gradcomp; start all workers with the same program")};
  }
  if (header.num_tensors != expected.num_tensors) {
    return {Concat(header.num_tensors, " tensors; expected ", expected.num_tensors,
                   "; start all workers with the same program")};
  }
  if (expected.step && header.step != *expected.step) {
    return {Concat("step ", header.step, "; expected ", *expected.step,
                   ": all replicas must be at the same step")};
  }
  if (header.plan != expected.plan) {
    return {Concat("plan ", header.plan, "; expected ", expected.plan,
                   ": the replica follows another plan, one with other settings of tensors; all "
                   "replicas must change their settings at the same step")};
  }
  if (header.flags & ~kNonFiniteFlag) {
    return {Concat("flags ", header.flags, "; expected 0 or ", kNonFiniteFlag)};
  }
  if (expected.length) {
    if (header.length == *expected.length) return {};
    return {Concat("length of ", header.length, " words; expected ", *expected.length,
                   ", which tensors and settings give")};
  }
  if (header.non_finite() && header.length != kHeaderWords) {
    return {Concat("length of ", header.length, " words with the non-finite flag; expected ",
                   kHeaderWords, ": the header alone")};
  }
  return {};
}

Status OfReplica(int64_t replica, const Status& status) {
  if (status.ok()) return status;
  return {Concat("payload of replica ", replica, ": ", status.message)};
}

Status OfTensor(int64_t tensor, const Status& status) {
  if (status.ok()) return status;
  return {Concat("tensor ", tensor, ": ", status.message)};
}

}  // namespace gradcomp
