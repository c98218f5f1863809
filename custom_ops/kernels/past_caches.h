// Writes results that nobody reads before other memory has replaced them in the caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace gradcomp {

// Results of this size replace each other in the caches of most processors.
inline constexpr int64_t kBeyondCaches = int64_t{1} << 23;  // elements

// An ordinary store first reads the cache line that it replaces; these stores don't.
inline void CopyPastCaches(const float* from, int64_t size, float* to) {
  int64_t i = 0;
#if defined(__x86_64__)
  while (i < size && reinterpret_cast<uintptr_t>(to + i) % sizeof(__m128) != 0) {
    to[i] = from[i];
    ++i;
  }
  for (; i + 4 <= size; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  _mm_sfence();  // before other threads read it
#endif
  std::memcpy(to + i, from + i, 4 * (size - i));
}

}  // namespace gradcomp
