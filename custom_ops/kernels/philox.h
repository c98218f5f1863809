// Philox 4x64-10, a counter-based generator: Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011. The same as numpy.random.Philox, which counts before it generates.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_PHILOX_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_PHILOX_H_

#include <cstdint>

namespace gradcomp {

class Philox {
 public:
  static constexpr int64_t kWords = 4;  // that each counter gives

  Philox(uint64_t key0, uint64_t key1) {
    for (int round = 0; round < kRounds; ++round) {
      keys_[round][0] = key0 + round * 0x9e3779b97f4a7c15u;
      keys_[round][1] = key1 + round * 0xbb67ae8584caa73bu;
    }
  }

  // Of the counter of 256 bits with the words c0, the lowest, to c3.
  void Generate(uint64_t c0, uint64_t c1, uint64_t c2, uint64_t c3, uint64_t* words) const {
    using Product = unsigned __int128;
    for (const auto& key : keys_) {
      const Product a = Product{0xd2e7470ee14c6c93u} * c0;
      const Product b = Product{0xca5a826395121157u} * c2;
      c0 = High(b) ^ c1 ^ key[0];
      c1 = Low(b);
      c2 = High(a) ^ c3 ^ key[1];
      c3 = Low(a);
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
  }

 private:
  static constexpr int kRounds = 10;

  static uint64_t High(unsigned __int128 product) { return static_cast<uint64_t>(product >> 64); }
  static uint64_t Low(unsigned __int128 product) { return static_cast<uint64_t>(product); }

  uint64_t keys_[kRounds][2];
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_PHILOX_H_
