// The common part of the fuzz targets. With clang, use -fsanitize=fuzzer. With other compilers,
// this file has a main function that mutates valid payloads, reproducibly: fuzz_<method> SECONDS.
// `fuzz_<method> seed FILE` writes a valid payload as a seed for libFuzzer.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "check.h"
#include "support.h"

namespace gradcomp {

// A target defines these two functions. DecodeAll decodes the words in all possible ways.
std::vector<std::vector<int32_t>> ValidPayloads();
void DecodeAll(const std::vector<int32_t>& words);

namespace {

// Gives a mutated payload a valid checksum, because the decoder refuses any other.
void Reseal(std::vector<int32_t>* words) {
  PayloadHeader header;
  if (static_cast<int64_t>(words->size()) < kHeaderWords) return;
  std::memcpy(static_cast<void*>(&header), words->data(), sizeof header);
  if (header.length < kHeaderWords || header.length > static_cast<int64_t>(words->size())) return;
  WriteHeader(header, words->data());
}

// Decodes a copy that ends where its memory ends, so that the sanitizer sees every read beyond it.
void DecodeExactly(const std::vector<int32_t>& words) {
  std::vector<int32_t> exact(words.begin(), words.end());
  exact.shrink_to_fit();
  DecodeAll(exact);
}

// Returns mostly places in the header, in the table and at the end of the last codes, which
// determine bounds.
size_t InterestingPlace(std::mt19937* random, size_t size) {
  const size_t near = (*random)() % std::min<size_t>(size, 40);
  switch ((*random)() % 4) {
    case 0:
      return near;
    case 1:
      return size - 1 - near / 10;
    default:
      return (*random)() % size;
  }
}

int32_t MutateWord(std::mt19937* random, int32_t word) {
  switch ((*random)() % 6) {
    case 0:
      return static_cast<int32_t>((*random)());
    case 1:
      return 0;
    case 2:
      return -1;
    case 3:
      return static_cast<int32_t>(static_cast<uint32_t>(word) + ((*random)() & 2) - 1);
    default:
      return word ^ static_cast<int32_t>(1u << (*random)() % 32);
  }
}

void Resize(std::mt19937* random, std::vector<int32_t>* words) {
  if ((*random)() % 2 == 0) {
    words->resize((*random)() % words->size());
  } else {
    words->insert(words->end(), words->begin(), words->begin() + (*random)() % words->size());
  }
  if (static_cast<int64_t>(words->size()) < kHeaderWords || (*random)() % 4 == 0) return;
  const int64_t length = words->size();
  std::memcpy(words->data() + offsetof(PayloadHeader, length) / 4, &length, sizeof length);
}

[[maybe_unused]] void Mutate(std::mt19937* random, std::vector<int32_t>* words) {
  for (uint32_t n = 1 + (*random)() % 4; n > 0 && !words->empty(); --n) {
    if ((*random)() % 8 == 0) {
      Resize(random, words);
    } else {
      int32_t& word = (*words)[InterestingPlace(random, words->size())];
      word = MutateWord(random, word);
    }
  }
}

}  // namespace
}  // namespace gradcomp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<int32_t> words(size / 4);
  if (!words.empty()) std::memcpy(words.data(), data, 4 * words.size());
  gradcomp::DecodeExactly(words);
  gradcomp::Reseal(&words);
  gradcomp::DecodeExactly(words);
  return 0;
}

#ifndef GRADCOMP_LIBFUZZER
int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const std::vector<std::vector<int32_t>> valid = gradcomp::ValidPayloads();
  if (argc == 3) {
    std::ofstream(argv[2]).write(reinterpret_cast<const char*>(valid[0].data()),
                                 4 * valid[0].size());
    return 0;
  }
  const auto end = Clock::now() + std::chrono::duration<double>(argc > 1 ? std::atof(argv[1]) : 20);
  std::mt19937 engine(1);
  int64_t inputs = 0;
  for (; Clock::now() < end; ++inputs) {
    std::vector<int32_t> words = valid[inputs % valid.size()];
    gradcomp::Mutate(&engine, &words);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(words.data()), 4 * words.size());
  }
  std::printf("%lld inputs\n", static_cast<long long>(inputs));
}
#endif
