// The header in front of every payload, whatever the method. Layout: docs/payload_format.md.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common.h"

namespace gradcomp {

inline constexpr uint32_t kPayloadMagic = 0x43474654;  // "TFGC"
inline constexpr uint16_t kPayloadVersion = 2;
inline constexpr uint32_t kNonFiniteFlag = 1;

// Python writes the payloads of the methods from ScaleCom on: their numbers are also in
// ops/payload.py.
enum class Method : uint16_t {
  kAdaComp = 1,
  kQsgd = 2,
  kSignSgd = 3,
  kTopK = 4,
  kScaleCom = 5,
  kLgc = 6,
  kSidCo = 7,
  kMaxNorm = 8,
};

struct PayloadHeader {
  uint32_t magic = kPayloadMagic;
  uint16_t version = kPayloadVersion;
  uint16_t method = 0;
  int64_t fingerprint = 0;
  int64_t plan = 0;  // PlanOf
  int64_t step = 0;
  uint32_t flags = 0;
  uint32_t num_tensors = 0;
  int64_t length = 0;  // of the whole payload, in words of 32 bits
  uint64_t checksum = 0;

  bool non_finite() const { return flags & kNonFiniteFlag; }
};
static_assert(sizeof(PayloadHeader) == 56, "the header is copied to the wire as it lies in memory");
#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are little endian");
#endif

inline constexpr int64_t kHeaderWords = sizeof(PayloadHeader) / sizeof(int32_t);

// One payload where it lies. `body` is what follows the header.
struct PayloadView {
  PayloadHeader header;
  const int32_t* words = nullptr;

  const int32_t* body() const { return words + kHeaderWords; }
  int64_t body_words() const { return header.length - kHeaderWords; }
};

// What a receiver knows beforehand about a payload.
struct ExpectedHeader {
  Method method;
  int64_t fingerprint;
  int64_t plan;
  std::optional<int64_t> step;  // absent: any
  int64_t num_tensors;
  std::optional<int64_t> length;  // absent: it varies, and is that of the header if not finite
};

// A digest of a method's main setting of each tensor, which may be another one in each step; of an
// empty list for a method without one.
int64_t PlanOf(const std::vector<int64_t>& settings);

// Fills in the checksum over the header and the body behind it, and writes the header.
void WriteHeader(PayloadHeader header, int32_t* payload);

// Finds the payload at the start of each of `num_payloads` rows of `row_words`. Trusts nothing else.
Status ReadRows(const int32_t* words, int64_t num_payloads, int64_t row_words,
                std::vector<PayloadView>* payloads);

// Checks checksum, method, fingerprint, step, number of tensors, plan and flags. What depends on the
// plan, such as the length, comes behind it.
Status CheckHeader(const PayloadView& payload, const ExpectedHeader& expected);

// Say which payload, and which tensor of it, an error is about.
Status OfReplica(int64_t replica, const Status& status);
Status OfTensor(int64_t tensor, const Status& status);

}  // namespace gradcomp
