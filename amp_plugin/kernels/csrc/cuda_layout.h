// The structs that launches pass to kernels, and the arithmetic that host and device must do identically, bit
// for bit. Both g++ and NVRTC compile this file, so it includes nothing. NVRTC compiles its functions for the
// device.
#pragma once

namespace amp_plugin::cuda {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum DType : u8 { kFloat16, kBFloat16, kFloat32, kFloat64, kComplex64, kComplex128 };

enum StateType : u8 { kStateFloat32, kStateBFloat16, kStateCodes };  // the same order as State in step_rows.h

constexpr u32 kCodeBlock = 128;  // elements that share one unit; the unit is stored behind them
constexpr u32 kCodeBlockBytes = 132;

constexpr u32 kThreads = 256;  // threads of a block that works on a table
constexpr u32 kGranuleBytes = 4096;
constexpr u32 kGranulesOfTensor = 2;  // a block moves about 8 KB in the time of one trip to memory
constexpr u32 kGranuleElements = 1024;  // for ops that go through several tensors in parallel

struct alignas(16) Row {
  u64 address;
  u64 out_address;  // the second address that the kernel needs for this tensor, or 0
  u64 numel;
  u32 first_granule;  // ascending; an empty tensor has the same number as the next tensor
  u8 dtype;
  u8 out_dtype;
  u16 unused;
};
static_assert(sizeof(Row) == 32);

// The result of one block.
struct alignas(16) Partial {
  double total;
  u32 bits;
  u32 unused;
};

struct Table {
  const Row* rows;
  u32* marks;  // one for each tensor, 0 before and after each launch
  Partial* partials;  // one for each block
  u32* ticket;  // 0 before and after each launch
  u32 count;  // number of tensors; a step has several rows per tensor
  u32 granules;
};

// A one-element float32 or float64 tensor that stays on the device. If `is_inverted`, the kernel uses 1
// divided by it. The address is null if there is no such tensor.
struct DeviceScalar {
  const void* address;
  u32 is_double;
  u32 is_inverted;
};

// The addresses that a measurement writes its results to.
struct Results {
  float* norm;
  float* found_inf;
  u8* flags;  // one for each tensor
};

constexpr u32 kMostStates = 3, kMostCounters = 2;  // per parameter
constexpr u32 kMostNumbers = 12;  // per rule

struct StepNumbers {
  double value[kMostNumbers];
};

// Returns 32 pseudo-random bits for a number. After Wellons, "Hash Function Prospector", 2018.
inline u32 random_bits(u32 number, u32 seed) {
  u32 bits = number * 0x9E3779B1u + seed;
  bits = (bits ^ (bits >> 15)) * 0x2C1B3C6Du;
  bits = (bits ^ (bits >> 12)) * 0x297A2D39u;
  return bits ^ (bits >> 15);
}

// The 16 random bits that round each element of a block of codes, for every state but the first. Only the
// start of the sequence is random. From there the high bytes advance by kStride, which spreads them evenly.
constexpr u32 kStride = 159;

struct Draws {
  u32 first;  // first * kStride is the high byte of the block's first element
  u32 low;  // the low byte, the same for all elements of the block

  Draws() = default;
  Draws(u32 block, u32 seed, u32 state) {
    const u32 bits = random_bits(block, seed) >> (state == 1 ? 0 : 16);
    first = bits & 0xFFu;
    low = bits >> 8 & 0xFFu;
  }
  u32 high(u32 place) const { return (first + place) * kStride & 0xFFu; }
};

inline u32 seed_of(double step) { return u32(u64(step)) * 0x85EBCA77u; }

// Splits a float32 into a bfloat16 (the high half) and a signed remainder (the low half), which counts units
// in float32's last place.
//
// Rounding is to nearest with ties away from zero. Unlike ties to even, this can be undone. There is one
// exception: a NaN whose high half would not be a NaN (because its payload is in the low bits, or rounds up)
// becomes the quiet NaN of the same sign.
inline u32 pack_weight(u32 bits) {
  const u32 magnitude = bits & 0x7FFFFFFFu;
  const bool lost_nan = (magnitude > 0x7F800000u && magnitude < 0x7F808000u) || magnitude >= 0x7FFF8000u;
  const u32 kept = lost_nan ? (bits & 0x80000000u) | 0x7FC00000u : bits;
  return ((kept + 0x8000u) & 0xFFFF0000u) | (kept & 0xFFFFu);
}

// Joins the two halves. If the high half is zero, the low half is ignored: code that sets a weight to zero
// does not know of the low half, and a negative low half would then give a NaN. Float32 numbers below 4.6e-41
// therefore come back as zero.
inline u32 unpack_weight(u16 high, u16 low) {
  const u32 bits = u32(high) << 16;
  return (bits & 0x7FFF0000u) == 0 ? bits : bits + u32(int(short(low)));
}

constexpr u32 kMostPacked = 32;  // limit for the measurements, the flags and the powers of one launch

struct Measurements {
  DeviceScalar norms[kMostPacked];
  DeviceScalar flags[kMostPacked];
  double replicas[kMostPacked];  // the number of replicas of each power
  u8 slots[kMostPacked];  // the slot of each norm
  u32 norm_count;
  u32 flag_count;
  u32 power_count;
};

// The values whose sum a step is judged by, and the growth trackers of its loss scales.
struct StepValues {
  DeviceScalar values[kMostPacked];
  int* trackers[kMostPacked];
  u32 count;
  u32 tracker_count;
};

struct Packed {
  const double* values[kMostPacked];
  u32 power_counts[kMostPacked];
  u32 count;
};

// The verdict on a step. kernels/reference.py describes the rule.

enum SpikeAction : int { kSkipSpike = 0, kClipSpike = 1, kRaiseSpike = 2 };

struct SpikeRule {
  float sigma;
  float least_deviation;  // as a fraction of the mean
  float window;
  float warmup;
  int action;  // a SpikeAction
};

struct StepStatistics {
  float mean;
  float variance;
  float steps;
  float held;  // 1 after a spike that shall raise an error
};

constexpr u32 kRulingNumbers = 6;
constexpr float kNoLimit = 3.4028235e38f;  // float32's largest number

struct StepRuling {
  float skipped;  // 1 if the step is skipped
  float factor;  // what the gradients are multiplied by
  float code;  // 1 for a spike, 2 for a step that is held back after one
  float value;
  float limit;  // kNoLimit during warm-up, when no step counts as a spike
  float norm;  // the gradient norm times the factor
  int is_left_out;  // 1 if the step is skipped although there was no overflow

  void write(float* numbers) const {
    const float all[kRulingNumbers]{skipped, factor, code, value, limit, norm};
    for (u32 i = 0; i < kRulingNumbers; ++i) numbers[i] = all[i];
  }
};

inline bool is_number(float value) { return value - value == 0; }

inline StepRuling judge(StepStatistics& now, float value, float norm, bool overflow, const SpikeRule& rule) {
  const bool held = now.held > 0, warm = now.steps >= rule.warmup;
  const float deviation = sqrtf(now.variance), least = rule.least_deviation * fabsf(now.mean);
  const float limit = now.mean + rule.sigma * (deviation > least ? deviation : least);
  const bool ordinary = value <= limit;  // false for a NaN
  const bool spike = warm && !overflow && !held && !ordinary;
  StepRuling ruling{};
  const bool skipped = overflow || held || (spike && rule.action != kClipSpike);
  ruling.skipped = skipped ? 1.0f : 0.0f;
  ruling.factor = 1.0f;
  if (spike && rule.action == kClipSpike) {
    const float factor = now.mean / (norm + 1e-6f);
    ruling.factor = factor < 1.0f ? factor : 1.0f;
  }
  ruling.value = value;
  ruling.limit = warm ? limit : kNoLimit;
  ruling.norm = norm * ruling.factor;
  ruling.code = held && !overflow ? 2.0f : spike ? 1.0f : 0.0f;
  ruling.is_left_out = skipped && !overflow;
  const float learned = warm && !ordinary ? limit : value;
  if (!overflow && !held && is_number(learned)) {
    const float count = now.steps + 1 < rule.window ? now.steps + 1 : rule.window;
    const float change = learned - now.mean;
    now.variance = (1 - 1 / count) * (now.variance + change * change / count);
    now.mean += change / count;
    now.steps = count;
  }
  if (spike && rule.action == kRaiseSpike) now.held = 1;
  return ruling;
}

}  // namespace amp_plugin::cuda
