#include "pack_bits.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace gradcomp {
namespace {

// Returns a mask of the lowest `width` bits of every second field of `field` bits.
constexpr uint64_t FieldMask(int width, int field) {
  uint64_t mask = 0;
  for (int at = 0; at < 64; at += 2 * field) mask |= ((uint64_t{1} << width) - 1) << at;
  return mask;
}

// Merges pairs of fields of kField bits, which have kWidth used bits each, into fields of twice the
// size.
template <int kWidth, int kField>
uint64_t Join(uint64_t fields) {
  constexpr uint64_t kMask = FieldMask(kWidth, kField);
  return (fields & kMask) | (fields >> (kField - kWidth) & kMask << kWidth);
}

template <int kWidth, int kField>
uint64_t Split(uint64_t fields) {
  constexpr uint64_t kMask = FieldMask(kWidth, kField);
  return (fields & kMask) | (fields & kMask << kWidth) << (kField - kWidth);
}

// Moves 8 codes, one in each byte, to the lowest 8 * kBits bits, and back.
template <int kBits>
uint64_t Squeeze(uint64_t codes) {
  return Join<4 * kBits, 32>(Join<2 * kBits, 16>(Join<kBits, 8>(codes)));
}

template <int kBits>
uint64_t Spread(uint64_t packed) {
  return Split<kBits, 8>(Split<2 * kBits, 16>(Split<4 * kBits, 32>(packed)));
}

template <int kBits>
constexpr Vectorized kSqueezeAll{[](uint64_t* eights, int64_t count) GRADCOMP_INLINED {
  for (int64_t i = 0; i < count; ++i) eights[i] = Squeeze<kBits>(eights[i]);
}};

template <int kBits>
constexpr Vectorized kSpreadAll{[](uint64_t* eights, int64_t count) GRADCOMP_INLINED {
  for (int64_t i = 0; i < count; ++i) eights[i] = Spread<kBits>(eights[i]);
}};

template <int kBits>
void PackEights(uint64_t* eights, int64_t count, uint8_t* packed) {
  kSqueezeAll<kBits>(eights, count);
  for (int64_t i = 0; i < count; ++i) std::memcpy(packed + i * kBits, &eights[i], kBits);
}

template <int kBits>
void UnpackEights(uint64_t* eights, int64_t count, uint8_t* packed) {
  for (int64_t i = 0; i < count; ++i) {
    eights[i] = 0;
    std::memcpy(&eights[i], packed + i * kBits, kBits);
  }
  kSpreadAll<kBits>(eights, count);
}

using Convert = void (*)(uint64_t* eights, int64_t count, uint8_t* packed);
constexpr Convert kPack[] = {PackEights<1>, PackEights<2>, PackEights<3>, PackEights<4>,
                             PackEights<5>, PackEights<6>, PackEights<7>, PackEights<8>};
constexpr Convert kUnpack[] = {UnpackEights<1>, UnpackEights<2>, UnpackEights<3>, UnpackEights<4>,
                               UnpackEights<5>, UnpackEights<6>, UnpackEights<7>, UnpackEights<8>};

}  // namespace

void CodeChunk::Pack(int64_t num_codes, int bits, int32_t* words) {
  const int64_t count = CeilDiv(num_codes, 32) * 4;  // whole words for any number of bits
  std::fill(codes() + num_codes, codes() + 8 * count, 0);
  uint8_t packed[kSize];
  kPack[bits - 1](eights_, count, packed);
  std::memcpy(words, packed, 4 * PackedWords(num_codes, bits));
}

void CodeChunk::Unpack(const int32_t* words, int64_t num_codes, int bits) {
  const int64_t count = CeilDiv(num_codes, 32) * 4;
  uint8_t packed[kSize];
  std::memcpy(packed, words, 4 * PackedWords(num_codes, bits));
  kUnpack[bits - 1](eights_, count, packed);
}

Status CheckPadding(const int32_t* words, int64_t num_codes, int bits) {
  const int used = num_codes * bits % 32;
  if (used == 0) return {};
  const uint32_t last = words[PackedWords(num_codes, bits) - 1];
  if (last >> used == 0) return {};
  return {"the bits behind the last code are not 0; expected zeros"};
}

}  // namespace gradcomp
