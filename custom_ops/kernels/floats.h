// The types of gradients, and the float32 arithmetic of all variants of the kernels.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gradcomp {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
enum class GradientType { kFloat, kHalf, kBFloat16 };

// Calls work(gradient) with a pointer of the gradient's type.
template <typename Work>
void WithGradient(GradientType type, const void* gradient, const Work& work) {
  switch (type) {
    case GradientType::kFloat:
      return work(static_cast<const float*>(gradient));
    case GradientType::kHalf:
      return work(static_cast<const Half*>(gradient));
    case GradientType::kBFloat16:
      return work(static_cast<const BFloat16*>(gradient));
  }
}

// Returns a pointer to the element at an index.
inline const void* GradientAt(GradientType type, const void* gradient, int64_t index) {
  const int64_t bytes = type == GradientType::kFloat ? 4 : 2;
  return static_cast<const char*>(gradient) + index * bytes;
}

inline constexpr uint32_t kSignBit = 0x80000000u;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

inline uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns a magnitude as bits, which have the same order as the floats; infinity and NaN are the
// largest. An integer maximum therefore both finds a bin's maximum and shows whether it is finite.
inline uint32_t MagnitudeBits(float value) { return ToBits(value) & ~kSignBit; }
inline bool IsFiniteMagnitude(uint32_t bits) { return bits < kInfinityBits; }

// Returns the largest magnitude of float32 values.
float LargestMagnitude(const void* values, int64_t size);
bool AllFinite(const void* values, int64_t size);

inline float ToFloat(float value) { return value; }
inline float ToFloat(BFloat16 value) { return FromBits(uint32_t{value.bits} << 16); }
inline float ToFloat(Half value) {  // without branches, for vector instructions
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t exact = ToBits(FromBits(magnitude << 13) * 0x1p112f);  // denormals, too
  const uint32_t not_finite = magnitude >= 0x7c00u ? kInfinityBits : 0;
  return FromBits(uint32_t{value.bits & 0x8000u} << 16 | exact | not_finite);
}

// Makes this thread follow IEEE 754 during the lifetime of this object. TensorFlow flushes
// denormals to zero on some of its threads only, and results must not depend on the thread.
class IeeeArithmetic {
 public:
#if defined(__x86_64__)
  IeeeArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushBits); }
  ~IeeeArithmetic() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushBits = 0x8040;  // flush to zero, denormals are zero
  const unsigned saved_;
#elif defined(__aarch64__)
  IeeeArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlushBits) : "memory");
  }
  ~IeeeArithmetic() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }

 private:
  static constexpr uint64_t kFlushBits = uint64_t{1} << 24;
  uint64_t saved_;
#else
  IeeeArithmetic() {}
  ~IeeeArithmetic() {}

 private:
#endif
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;
};

}  // namespace gradcomp
