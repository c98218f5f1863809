// Runs CUDA kernels on the CPU; include this file before a kernel's source. The threads of a block
// are fibres, which switch only where the kernel synchronizes. The orders of threads and blocks are
// drawn from a seed, so that missing synchronization shows as different results.
//
// A launch ends the program if the threads of a block, or the lanes of a warp, wait in different
// places. On a GPU, they would hang or read undefined data. Shared memory keeps the data of the
// block before. Here, a shuffle or a ballot orders memory like __syncwarp, which a GPU does not
// guarantee. The emulator has only the part of CUDA that our kernels use.
#pragma once

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define GRADCOMP_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GRADCOMP_EMULATOR_ASAN 1
#endif
#endif
#ifdef GRADCOMP_EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace gpu_emulator {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class Place { kReady, kBarrier, kWarp, kDone };

struct Index {
  unsigned x = 0;
};

// The saved state of a suspended fibre or scheduler.
#ifdef __x86_64__
using Context = void*;  // the stack pointer
// Like swapcontext, but without its system calls, which would take most of the time.
extern "C" void gradcomp_switch(Context* from, Context to);
asm(R"(
.pushsection .text
.weak gradcomp_switch
gradcomp_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.popsection
)");
inline void Switch(Context* from, Context* to) { gradcomp_switch(from, *to); }
inline void Prepare(Context* context, char* stack, void (*enter)()) {
  constexpr int kSaved = 6;
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 16);
  *--top = nullptr;  // no return address
  *--top = reinterpret_cast<void*>(enter);
  *context = top - kSaved;
}
#else
using Context = ucontext_t;
inline void Switch(Context* from, Context* to) { swapcontext(from, to); }
inline void Prepare(Context* context, char* stack, void (*enter)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = kStackBytes;
  context->uc_link = nullptr;
  makecontext(context, enter, 0);
}
#endif

// A thread of the running block.
struct Fibre {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Place place = Place::kDone;
  const char* operation = nullptr;  // the warp operation in which the thread waits
  int lane = 0;
  uint64_t given = 0;     // the operation's input
  uint64_t received = 0;  // the operation's result
  int argument = 0;
  void* fake_stack = nullptr;  // of the address sanitizer
};

class Block {
 public:
  void Run(int num_threads, unsigned seed, const std::function<void()>& body) {
    engine_.seed(seed);
    body_ = &body;
    while (static_cast<int>(fibres_.size()) < num_threads) {
      fibres_.push_back(std::make_unique<Fibre>());
    }
    num_threads_ = num_threads;
    ready_.clear();
    for (int i = 0; i < num_threads; ++i) {
      Start(fibres_[i].get());
      ready_.push_back(i);
    }
    // Runs either any ready thread, or one warp as far as possible.
    const bool one_goes_ahead = engine_() % 2;
    std::shuffle(ready_.begin(), ready_.end(), engine_);
    while (true) {
      if (ready_.empty() && !PassBarrier()) return;
      const size_t drawn = one_goes_ahead ? ready_.size() - 1 : engine_() % ready_.size();
      const int number = ready_[drawn];
      ready_[drawn] = ready_.back();
      ready_.pop_back();
      current_ = number;
      SwitchTo(fibres_[number].get());
      PassWarp(number / kLanes);
    }
  }

  int current() const { return current_; }

  void Barrier() { Wait(Place::kBarrier); }

  uint64_t InWarp(const char* operation, uint64_t given, int argument) {
    Fibre* fibre = fibres_[current_].get();
    fibre->operation = operation;
    fibre->given = given;
    fibre->argument = argument;
    Wait(Place::kWarp);
    return fibre->received;
  }

  static Block& Running() {
    static Block block;
    return block;
  }

 private:
  [[noreturn]] static void Fail(const char* what) {
    std::fprintf(stderr, "GPU emulator: %s\n", what);
    std::abort();
  }

  void Start(Fibre* fibre) {
    fibre->place = Place::kReady;
    Prepare(&fibre->context, fibre->stack.get(), &Block::Enter);
  }

  static void Enter() {
    Block& block = Running();
    block.Arrived(nullptr);
    (*block.body_)();
    Fibre* fibre = block.fibres_[block.current_].get();
    fibre->place = Place::kDone;
    block.Leave(nullptr, fibre);
  }

  void Wait(Place place) {
    Fibre* fibre = fibres_[current_].get();
    fibre->place = place;
    Leave(&fibre->fake_stack, fibre);
    Arrived(fibre->fake_stack);
  }

  // Switches from the scheduler to a fibre, which switches back when it waits.
  void SwitchTo(Fibre* fibre) {
#ifdef GRADCOMP_EMULATOR_ASAN
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, fibre->stack.get(), kStackBytes);
    Switch(&scheduler_, &fibre->context);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    Switch(&scheduler_, &fibre->context);
#endif
  }

  void Leave(void** fake_stack, Fibre* fibre) {
#ifdef GRADCOMP_EMULATOR_ASAN
    __sanitizer_start_switch_fiber(fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#else
    (void)fake_stack;
#endif
    Switch(&fibre->context, &scheduler_);
  }

  void Arrived(void* fake_stack) {
#ifdef GRADCOMP_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#else
    (void)fake_stack;
#endif
  }

  // Called when no thread is ready. Returns whether the block continues.
  bool PassBarrier() {
    int num_done = 0;
    for (int i = 0; i < num_threads_; ++i) {
      if (fibres_[i]->place == Place::kWarp) Fail("a warp waits for lanes that went elsewhere");
      num_done += fibres_[i]->place == Place::kDone;
    }
    if (num_done == num_threads_) return false;
    if (num_done > 0) Fail("a barrier waits for threads that have ended");
    for (int i = 0; i < num_threads_; ++i) MakeReady(i);
    std::shuffle(ready_.begin(), ready_.end(), engine_);
    return true;
  }

  void MakeReady(int number) {
    fibres_[number]->place = Place::kReady;
    ready_.push_back(number);
  }

  // Executes a warp operation once all lanes have reached it.
  void PassWarp(int warp) {
    Fibre* lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      lanes[i] = fibres_[warp * kLanes + i].get();
      if (lanes[i]->place != Place::kWarp) return;
      if (lanes[i]->operation != lanes[0]->operation) Fail("lanes of a warp do different things");
    }
    for (int i = 0; i < kLanes; ++i) lanes[i]->received = Received(lanes, i);
    for (int i = 0; i < kLanes; ++i) MakeReady(warp * kLanes + i);
  }

  static uint64_t Received(Fibre* const* lanes, int lane) {
    const std::string_view operation = lanes[lane]->operation;
    if (operation == "ballot") {
      uint64_t bits = 0;
      for (int i = 0; i < kLanes; ++i) bits |= (lanes[i]->given & 1) << i;
      return bits;
    }
    const int argument = lanes[lane]->argument;
    const int from = operation == "up"     ? lane - argument
                     : operation == "down" ? lane + argument
                     : operation == "xor"  ? lane ^ argument
                                           : argument;
    return lanes[from >= 0 && from < kLanes ? from : lane]->given;
  }

  std::vector<std::unique_ptr<Fibre>> fibres_;
  std::vector<int> ready_;
  std::mt19937 engine_;
  const std::function<void()>* body_ = nullptr;
  Context scheduler_;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
  int num_threads_ = 0;
  int current_ = 0;
};

inline Index block_index;

inline Index ThreadIndex() { return {static_cast<unsigned>(Block::Running().current())}; }

template <typename Value>
Value Shuffle(const char* operation, Value value, int argument) {
  static_assert(sizeof value <= sizeof(uint64_t), "larger than a GPU can shuffle");
  uint64_t given = 0;
  std::memcpy(&given, &value, sizeof value);
  const uint64_t received = Block::Running().InWarp(operation, given, argument);
  std::memcpy(&value, &received, sizeof value);
  return value;
}

template <typename To, typename From>
To Bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "bits are kept");
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Runs a launch, with blocks in an order drawn from the seed.
inline void Launch(long long num_blocks, int num_threads, unsigned seed,
                   const std::function<void()>& kernel) {
  std::vector<unsigned> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::mt19937 engine(seed);
  std::shuffle(blocks.begin(), blocks.end(), engine);
  for (unsigned block : blocks) {
    block_index.x = block;
    Block::Running().Run(num_threads, engine(), kernel);
  }
}

}  // namespace gpu_emulator

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define threadIdx (gpu_emulator::ThreadIndex())
#define blockIdx (gpu_emulator::block_index)

// Operations are compared by the address of their name.
inline const char kBallotOperation[] = "ballot";
inline const char kUpOperation[] = "up";
inline const char kDownOperation[] = "down";
inline const char kXorOperation[] = "xor";
inline const char kFromOperation[] = "from";
inline const char kSyncOperation[] = "sync";

inline void __syncthreads() { gpu_emulator::Block::Running().Barrier(); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  return static_cast<unsigned>(
      gpu_emulator::Block::Running().InWarp(kBallotOperation, vote, 0));
}
template <typename Value>
Value __shfl_up_sync(unsigned, Value value, int distance) {
  return gpu_emulator::Shuffle(kUpOperation, value, distance);
}
template <typename Value>
Value __shfl_down_sync(unsigned, Value value, int distance) {
  return gpu_emulator::Shuffle(kDownOperation, value, distance);
}
template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return gpu_emulator::Shuffle(kXorOperation, value, mask);
}

template <typename Value>
Value __shfl_sync(unsigned, Value value, int lane) {
  return gpu_emulator::Shuffle(kFromOperation, value, lane);
}
inline void __syncwarp() { gpu_emulator::Shuffle(kSyncOperation, 0, 0); }

// Atomic operations need no lock, because threads switch only where they synchronize.
template <typename Value>
Value atomicExch(Value* at, Value value) {
  std::swap(*at, value);
  return value;
}
template <typename Value>
Value atomicAdd(Value* at, Value value) {
  const Value before = *at;
  *at += value;
  return before;
}

template <typename Value>
Value atomicMax(Value* at, Value value) {
  const Value before = *at;
  *at = std::max(*at, value);
  return before;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline unsigned __float_as_uint(float value) { return gpu_emulator::Bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return gpu_emulator::Bits<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
