// The header of the payloads of all methods. docs/payload_format.md has the layout.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common.h"

namespace gradcomp {

inline constexpr uint32_t kPayloadMagic = 0x43474654;  // "TFGC"
inline constexpr uint16_t kPayloadVersion = 2;
inline constexpr uint32_t kNonFiniteFlag = 1;

// Python code writes the payloads of the methods from ScaleCom on, so ops/payload.py also has their
// numbers.
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
  int64_t length = 0;  // the whole payload, in words of 32 bits
  uint64_t checksum = 0;

  bool non_finite() const { return flags & kNonFiniteFlag; }
};
static_assert(sizeof(PayloadHeader) == 56, "the header is copied to the wire as it lies in memory");
#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are little endian");
#endif

inline constexpr int64_t kHeaderWords = sizeof(PayloadHeader) / sizeof(int32_t);

// A view of a payload. `body` is the part after the header.
struct PayloadView {
  PayloadHeader header;
  const int32_t* words = nullptr;

  const int32_t* body() const { return words + kHeaderWords; }
  int64_t body_words() const { return header.length - kHeaderWords; }
};

// The members of the header that a receiver knows in advance.
struct ExpectedHeader {
  Method method;
  int64_t fingerprint;
  int64_t plan;
  std::optional<int64_t> step;  // absent: any step
  int64_t num_tensors;
  std::optional<int64_t> length;  // absent: the length varies, and equals the header's if not finite
};

// Returns a digest of a method's main settings of the tensors, which may change in each step. A
// method without such settings passes an empty list.
int64_t PlanOf(const std::vector<int64_t>& settings);

// Computes the checksum of the header and of the body after it, and writes the header.
void WriteHeader(PayloadHeader header, int32_t* payload);

// Finds the payload at the start of each of `num_payloads` rows of `row_words`; all data is
// untrusted.
Status ReadRows(const int32_t* words, int64_t num_payloads, int64_t row_words,
                std::vector<PayloadView>* payloads);

// Checks checksum, method, fingerprint, step, number of tensors, plan and flags, and last the
// length, which depends on the plan.
Status CheckHeader(const PayloadView& payload, const ExpectedHeader& expected);

// These functions add the replica, or the tensor, to an error.
Status OfReplica(int64_t replica, const Status& status);
Status OfTensor(int64_t tensor, const Status& status);

}  // namespace gradcomp
