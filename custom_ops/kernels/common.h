// Helpers of all kernels. No file in this folder includes a TensorFlow header.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace gradcomp {

// Calls work(begin, end) on disjoint ranges that cover [0, count), possibly on several threads, and
// returns when all calls have ended. `cost` is the approximate work of one unit in processor
// cycles.
using Work = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t count, int64_t cost, const Work& work)>;

// The approximate number of elements per block, for work that costs about a cycle per element.
inline constexpr int64_t kBlockSize = 1 << 16;

struct Status {
  std::string message;  // empty: no error
  bool ok() const { return message.empty(); }
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream stream(std::ios_base::out);
  (stream << ... << parts);
  return stream.str();
}

// Runs all checks in parallel, and returns the error with the lowest index.
template <typename Check>
Status CheckAll(const ParallelFor& parallel_for, int64_t count, int64_t cost, const Check& check) {
  std::vector<Status> statuses(count);
  parallel_for(count, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) statuses[i] = check(i);
  });
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return {};
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace gradcomp
