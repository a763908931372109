// The part of CUDA C++ that our kernels use, emulated on the CPU, one block at a time.
//
// Each thread of a block is a fiber. It runs until it reaches a shuffle, a vote or a barrier, and then
// yields. A warp continues when all of its threads are at the same shuffle or vote. The block continues when
// all of its threads are at a barrier or have returned. Anything else is reported as an error. Threads, warps
// and blocks run in ascending or in descending order. A kernel that lacks a barrier gives different results
// in the two orders.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __shared__ static  // blocks run one after another
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline)) static
#define __grid_constant__

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Dimension {
  unsigned x = 0;
};
static Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr unsigned kMostThreads = 1024, kWarp = 32;
constexpr size_t kStackBytes = 128 * 1024;

enum class Waits { kRuns, kForWarp, kForBlock, kReturned };

struct Fiber {
  ucontext_t context;
  jmp_buf resume_point;
  bool started = false;
  Waits waits = Waits::kRuns;
  unsigned exchanges = 0;
};

static Fiber fibers[kMostThreads];
// two buffers, so that the next write does not overwrite a value before it is read
static uint64_t exchanged[2][kMostThreads];
static jmp_buf scheduler;
static char* stacks = nullptr;
static void (*body)(void* arguments);
static void* body_arguments;
static const char* error = nullptr;
static uint64_t barriers = 0;  // the barriers that blocks have met

static void wait_for(Waits what) {
  Fiber& fiber = fibers[threadIdx.x];
  fiber.waits = what;
  if (_setjmp(fiber.resume_point) == 0) _longjmp(scheduler, 1);
}

static void run_fiber() {
  for (;;) {
    body(body_arguments);
    wait_for(Waits::kReturned);
  }
}

[[gnu::noinline]] static void resume(unsigned thread) {
  threadIdx.x = thread;
  Fiber& fiber = fibers[thread];
  fiber.waits = Waits::kRuns;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume_point, 1);
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks + kStackBytes * thread;
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, run_fiber, 0);
  setcontext(&fiber.context);
}

// Runs a warp until all of its threads are at a barrier or have returned.
static void run_warp(unsigned begin, unsigned end, bool descending) {
  while (error == nullptr) {
    unsigned at_exchange = 0, alive = 0;
    for (unsigned i = 0; i < end - begin; ++i) {
      const unsigned thread = descending ? end - 1 - i : begin + i;
      if (fibers[thread].waits != Waits::kReturned && fibers[thread].waits != Waits::kForBlock)
        resume(thread);
    }
    for (unsigned thread = begin; thread < end; ++thread) {
      at_exchange += fibers[thread].waits == Waits::kForWarp;
      alive += fibers[thread].waits != Waits::kReturned;
      if (fibers[thread].exchanges != fibers[begin].exchanges) error = "a warp diverged around a shuffle";
    }
    if (at_exchange == 0) return;
    if (at_exchange != end - begin) error = "a shuffle or vote was not reached by the whole warp";
  }
}

static void run_block(unsigned threads, bool descending) {
  for (unsigned thread = 0; thread < threads; ++thread) {
    fibers[thread].waits = Waits::kRuns;
    fibers[thread].exchanges = 0;
  }
  for (unsigned at_barrier = 1; at_barrier > 0 && error == nullptr;) {
    const unsigned warps = (threads + kWarp - 1) / kWarp;
    for (unsigned i = 0; i < warps && error == nullptr; ++i) {
      const unsigned begin = (descending ? warps - 1 - i : i) * kWarp;
      run_warp(begin, begin + kWarp < threads ? begin + kWarp : threads, descending);
    }
    at_barrier = 0;
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (fibers[thread].waits != Waits::kForBlock) continue;
      fibers[thread].waits = Waits::kRuns;
      ++at_barrier;
    }
    barriers += at_barrier > 0;
  }
}

template <typename... Parameters, size_t... kIndex>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndex...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[kIndex])...);
}

// The sizes of a kernel's parameters in bytes, then a 0.
template <typename... Parameters>
const size_t* parameter_sizes(void (*)(Parameters...)) {
  static const size_t sizes[] = {sizeof(Parameters)..., 0};
  return sizes;
}

template <typename... Parameters>
const char* launch(
    void (*kernel)(Parameters...), unsigned blocks, unsigned threads, void** arguments, bool descending) {
  struct Call {
    void (*kernel)(Parameters...);
    void** arguments;
  } call_data{kernel, arguments};
  if (stacks == nullptr) {
    void* memory = mmap(
        nullptr, kStackBytes * kMostThreads, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks = static_cast<char*>(memory);
  }
  error = nullptr;
  body_arguments = &call_data;
  body = [](void* data) {
    auto* one = static_cast<Call*>(data);
    call(one->kernel, one->arguments, std::index_sequence_for<Parameters...>{});
  };
  blockDim.x = threads;
  gridDim.x = blocks;
  for (unsigned i = 0; i < blocks && error == nullptr; ++i) {
    blockIdx.x = descending ? blocks - 1 - i : i;
    run_block(threads, descending);
  }
  body_arguments = nullptr;
  for (Fiber& fiber : fibers) fiber.started = fiber.started && error == nullptr;
  return error;
}

// Gives one word to the warp, and returns when every thread of the warp has given one. Returns the words of
// the warp.
static uint64_t* exchange(uint64_t word) {
  Fiber& fiber = fibers[threadIdx.x];
  ++fiber.exchanges;
  uint64_t* slots = exchanged[fiber.exchanges % 2];
  slots[threadIdx.x] = word;
  wait_for(Waits::kForWarp);
  return slots + threadIdx.x / kWarp * kWarp;
}

}  // namespace emulation

static inline void __syncthreads() { emulation::wait_for(emulation::Waits::kForBlock); }

// After this call, all threads of a warp see what the others wrote before it.
static inline void __syncwarp() { emulation::exchange(0); }

template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  const uint64_t* slots = emulation::exchange(word);
  const unsigned lane = threadIdx.x % emulation::kWarp;
  memcpy(&value, &slots[lane + distance < emulation::kWarp ? lane + distance : lane], sizeof(T));
  return value;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  const uint64_t* slots = emulation::exchange(word);
  memcpy(&value, &slots[threadIdx.x % emulation::kWarp ^ mask], sizeof(T));
  return value;
}

template <typename T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  memcpy(&value, &emulation::exchange(word)[lane], sizeof(T));
  return value;
}

// Returns the number of threads of the block that vote true.
static inline int __syncthreads_count(bool vote) {
  static unsigned rounds[emulation::kMostThreads];
  static int votes[3];  // for this count, the next one, and the one after that, which is reset to 0
  const unsigned round = rounds[threadIdx.x]++;
  votes[round % 3] += vote;
  emulation::wait_for(emulation::Waits::kForBlock);
  votes[(round + 2) % 3] = 0;
  return votes[round % 3];
}

// Adds with rounding to zero. Kernels call it with numbers whose sum is exact in float64.
static inline float __fadd_rz(float a, float b) {
  const double sum = double(a) + double(b);
  const float nearest = float(sum);
  return double(nearest) > sum ? nextafterf(nearest, 0.0f) : nearest;
}

static inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* slots = emulation::exchange(vote);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < emulation::kWarp; ++lane) votes |= unsigned(slots[lane]) << lane;
  return votes;
}

static inline unsigned atomicOr(unsigned* address, unsigned value) {
  return std::exchange(*address, *address | value);
}
static inline unsigned atomicExch(unsigned* address, unsigned value) {
  return std::exchange(*address, value);
}

static inline int __popc(unsigned word) { return __builtin_popcount(word); }

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Clamps to the numbers from 0 to 1. A NaN becomes 0.
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

// Returns the bytes of two words, counted from 0 to 7, that the four lowest digits of `choice` name.
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned choice) {
  const uint64_t words = low | uint64_t(high) << 32;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i)
    result |= unsigned(words >> (8 * (choice >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}

static inline float __uint_as_float(unsigned word) { return same_bits<float>(word); }
static inline unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static inline double __longlong_as_double(long long word) { return same_bits<double>(word); }

template <typename T>
T __ldca(const T* address) {
  return *address;
}
template <typename T>
void __stwb(T* address, T word) {
  *address = word;
}

namespace amp_plugin::cuda {

// Reads a byte, so that an address outside of a tensor can be found.
static inline void prefetch(unsigned long long address) {
  (void)*reinterpret_cast<const volatile char*>(address);
}
// Not atomic: threads take turns, so each sees the writes of those before it.
static inline unsigned count_block(unsigned* count) { return (*count)++; }

// Has the largest error that the GPU may have: 2^-22 up or down.
static inline float log2_approximate(float x) {
  return float(log2(double(x)) + (__float_as_uint(x) & 8 ? 0x1p-22 : -0x1p-22));
}
static inline float exp2_approximate(float x) {
  return float(exp2(double(x)) * (1 + (__float_as_uint(x) & 8 ? 0x1p-22 : -0x1p-22)));
}

static inline unsigned byte_behind(unsigned high, unsigned word, int i) {
  return (high & 0xffffff00u) | (word >> (8 * i) & 0xffu);
}
template <int kByte>
unsigned bytes_of(const unsigned (&words)[4]) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = kByte == 11 ? (words[i] >> 31) * 255u : words[i] >> (8 * kByte) & 0xffu;
    result |= byte << (8 * i);
  }
  return result;
}
// The results are those of the GPU, which rounds to nearest too.
static inline float moderate_root(float x) { return sqrtf(x); }
static inline float moderate_inverse(float x) { return 1 / x; }
static inline float moderate_quotient(float a, float b) { return a / b; }

static inline float half_to_float(unsigned short bits) {
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction ? __uint_as_float(0x7fc00000u) : sign * HUGE_VALF;
  return sign * (exponent ? ldexpf(float(1024 + fraction), exponent - 25) : ldexpf(float(fraction), -24));
}

static inline unsigned short float_to_half(float value) {
  const unsigned sign = __float_as_uint(value) >> 16 & 0x8000u;
  const float magnitude = fabsf(value);
  if (value != value) return 0x7fff;
  if (magnitude >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
  if (magnitude == 0) return static_cast<unsigned short>(sign);
  int exponent;
  frexpf(magnitude, &exponent);  // magnitude = f * 2^exponent, f in [0.5, 1)
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const unsigned steps = unsigned(nearbyintf(ldexpf(magnitude, -unit)));  // rounds to nearest, ties to even
  return static_cast<unsigned short>(sign | (unsigned(unit + 24) * 1024u + steps));
}

}  // namespace amp_plugin::cuda
