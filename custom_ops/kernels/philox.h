// Philox 4x64-10, a counter-based generator: Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011. Gives the same numbers as numpy.random.Philox, which increments the counter
// before it generates. Plain C++ without includes, because NVRTC reads this file, too.
#ifndef TF_GRADCOMP_CUSTOM_OPS_KERNELS_PHILOX_H_
#define TF_GRADCOMP_CUSTOM_OPS_KERNELS_PHILOX_H_

#ifdef __CUDACC_RTC__
#define GRADCOMP_ALSO_ON_GPU __device__
#else
#define GRADCOMP_ALSO_ON_GPU
#endif

namespace gradcomp {

class Philox {
 public:
  using Word = unsigned long long;
  static constexpr int kWords = 4;  // words per counter

  GRADCOMP_ALSO_ON_GPU Philox(Word key0, Word key1) {
    for (int round = 0; round < kRounds; ++round) {
      keys_[round][0] = key0 + round * 0x9e3779b97f4a7c15u;
      keys_[round][1] = key1 + round * 0xbb67ae8584caa73bu;
    }
  }

  // Generates the words for a counter of 256 bits, with the words c0 (the lowest) to c3.
  GRADCOMP_ALSO_ON_GPU void Generate(Word c0, Word c1, Word c2, Word c3, Word* words) const {
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
  using Product = unsigned __int128;
  static constexpr int kRounds = 10;

  GRADCOMP_ALSO_ON_GPU static Word High(Product product) { return static_cast<Word>(product >> 64); }
  GRADCOMP_ALSO_ON_GPU static Word Low(Product product) { return static_cast<Word>(product); }

  Word keys_[kRounds][2];
};

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_KERNELS_PHILOX_H_
