// The structs that launches pass to kernels, and the arithmetic that host and device must do identically, bit
// for bit. Both g++ and NVRTC compile this file, so it includes nothing; with g++, include <cmath> before it.
// NVRTC compiles its functions for the device.
#pragma once

namespace amp_plugin::cuda {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum DType : u8 { kFloat16, kBFloat16, kFloat32, kFloat64, kComplex64, kComplex128 };

enum StateType : u8 { kStateFloat32, kStateBFloat16, kStateCodes };  // the same order as State in step_rows.h

constexpr u32 kCodeBlock = 128;  // elements of a block of 8-bit codes; csrc/step_states.h describes it
constexpr u32 kCodeBlockBytes = 132;  // the codes, and one float32

constexpr u32 kThreads = 256;  // threads of a block that works on a table
constexpr u32 kGranuleBytes = 4096;
// The extra granules of each tensor, for the cost of its start. In the time of one trip to memory, a block
// moves about 8 KB.
constexpr u32 kGranulesOfTensor = 2;
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

// A one-element float32 or float64 tensor that stays on its device. If `is_inverted`, its number is 1 divided
// by the element. The address is null if there is no such tensor.
struct DeviceScalar {
  const void* address;
  u32 is_double;
  u32 is_inverted;
};

// Returns the number. Call it only on the device of the tensor.
inline double read(const DeviceScalar& scalar) {
  if (scalar.is_double) {
    const double value = *static_cast<const double*>(scalar.address);
    return scalar.is_inverted ? 1 / value : value;
  }
  const float value = *static_cast<const float*>(scalar.address);
  return scalar.is_inverted ? 1 / value : value;
}

inline void write(const DeviceScalar& scalar, double value) {
  void* address = const_cast<void*>(scalar.address);
  if (scalar.is_double) {
    *static_cast<double*>(address) = value;
  } else {
    *static_cast<float*>(address) = float(value);
  }
}

inline double read_or(const DeviceScalar& scalar, double otherwise) {
  return scalar.address == nullptr ? otherwise : read(scalar);
}

inline float largest(float) { return 3.402823466e+38f; }
inline double largest(double) { return 1.7976931348623157e+308; }

template <typename Number>
inline bool is_finite(Number x) {
  return fabs(x) <= largest(x);
}

template <typename Number>
inline Number join_max(Number a, Number b) {  // a NaN counts as the largest
  return (b > a || b != b) ? b : a;
}

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

// Returns a seed for which the number 0 has the random bits that `number` has for `seed`.
inline u32 seed_from(u32 number, u32 seed) { return number * 0x9E3779B1u + seed; }

// Returns 32 pseudo-random bits for a number. After Wellons, "Hash Function Prospector", 2018.
inline u32 random_bits(u32 number, u32 seed) {
  u32 bits = seed_from(number, seed);
  bits = (bits ^ (bits >> 15)) * 0x2C1B3C6Du;
  bits = (bits ^ (bits >> 12)) * 0x297A2D39u;
  return bits ^ (bits >> 15);
}

// The random bits that round the elements of a block of a second moment (kSquare or kSecondSquare): 16 bits
// for each element. Only the start of the sequence is random. From there the high bytes advance by kStride,
// which spreads them evenly.
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

// The rest of this file computes the ops on a few numbers. On the CPU an op calls its function. On a GPU the
// op's kernel is one thread that calls the same function. kernels/reference.py describes what each computes.

// The factor that clipping multiplies gradients by, or 1 in a step that is skipped.
inline float clip_factor_of(float norm, float max_norm, const float* found_inf) {
  const float factor = max_norm / (norm + 1e-6f);
  const bool skipped = found_inf == nullptr ? !is_finite(norm) : *found_inf > 0;
  return skipped || factor > 1 ? 1.0f : factor;
}

inline void write_clip_factor(
    const float* norm, float max_norm, const float* scale, const float* found_inf, float* out) {
  const float clipped = clip_factor_of(*norm, max_norm, found_inf);
  *out = scale == nullptr ? clipped : *scale / clipped;
}

// How a loss scale grows and shrinks.

enum HysteresisMode : int { kApex = 0, kMegatron = 1, kDeepSpeed = 2 };

struct ScaleRule {
  double growth_factor;
  double backoff_factor;
  int growth_interval;
  float min_scale;
  float max_scale;
  int hysteresis;
  int mode;  // a HysteresisMode
};

inline void adjust_scale(
    float* scale, int* growth_tracker, int* hysteresis_tracker, const float* found_inf, ScaleRule rule) {
  if (*found_inf > 0) {
    const int left = *hysteresis_tracker;
    const bool spent = left <= 1;
    *growth_tracker = 0;
    if (!(spent && rule.mode == kDeepSpeed)) *hysteresis_tracker = left - 1;
    if (spent) {
      // A scale that is below min_scale already stays as it is.
      const float floor = *scale < rule.min_scale ? *scale : rule.min_scale;
      const float lower = static_cast<float>(*scale * rule.backoff_factor);  // in double, as torch does
      *scale = lower < floor ? floor : lower;
    }
    return;
  }
  const int steps = *growth_tracker + 1;
  const bool grows = steps >= rule.growth_interval;
  if (grows || rule.mode == kApex) *hysteresis_tracker = rule.hysteresis;
  *growth_tracker = grows ? 0 : steps;
  if (grows) {
    // A scale that is above max_scale already stays as it is.
    const float ceiling = *scale > rule.max_scale ? *scale : rule.max_scale;
    const float higher = static_cast<float>(*scale * rule.growth_factor);
    if (is_finite(higher)) *scale = higher > ceiling ? ceiling : higher;
  }
}

// The measurements of several ranks.

constexpr u32 kMostPacked = 32;  // limit for the measurements, the flags and the powers of one call

struct Measurements {
  DeviceScalar norms[kMostPacked];
  DeviceScalar flags[kMostPacked];
  double replicas[kMostPacked];  // for each power, the number of ranks that hold the same gradients
  u8 slots[kMostPacked];  // for each norm, the number of the power that it belongs to
  u32 norm_count;
  u32 flag_count;
  u32 power_count;
};

struct Packed {
  const double* values[kMostPacked];
  u32 power_counts[kMostPacked];
  u32 count;
};

inline bool is_infinite(double p) { return fabs(p) > largest(p); }

inline double neutral(double p) { return p < 0 && is_infinite(p) ? p : 0; }

inline double join_powers(double a, double b, double p) { return is_infinite(p) ? join_max(a, b) : a + b; }

// Returns value^exponent, to convert norms to the powers that are added, and back. For p = 0 and p = inf the
// value stays as it is; for p = -inf it is negated. torch.pow treats the same exponents specially.
inline double raised(double value, double exponent, double p) {
  if (p == 0 || is_infinite(p)) return p < 0 ? -value : value;
  if (exponent == 2) return value * value;
  if (exponent == 0.5) return sqrt(value);
  return exponent == 1 ? value : pow(value, exponent);
}

// Writes the measurements of this rank, which the ranks then add up.
inline void pack_powers(const Measurements& measured, double* packed, double p) {
  for (u32 slot = 0; slot < measured.power_count; ++slot) {
    double power = neutral(p);
    for (u32 i = 0; i < measured.norm_count; ++i) {
      if (measured.slots[i] == slot) power = join_powers(power, raised(read(measured.norms[i]), p, p), p);
    }
    packed[slot] = is_infinite(p) ? power : power / measured.replicas[slot];
  }
  double found = 0;
  for (u32 i = 0; i < measured.flag_count; ++i) found = join_max(found, read(measured.flags[i]));
  packed[measured.power_count] = found;
}

// Computes norm and found_inf from the sums over all ranks. There is one sum for each call of pack_powers().
inline void unpack_powers(const Packed& packed, double p, float* norm, float* found_inf) {
  double total = neutral(p), found = 0;
  for (u32 i = 0; i < packed.count; ++i) {
    const u32 count = packed.power_counts[i];
    for (u32 k = 0; k < count; ++k) total = join_powers(total, packed.values[i][k], p);
    found = packed.values[i][count];
  }
  *norm = float(raised(total, 1 / p, p));
  *found_inf = found > 0 ? 1.0f : 0.0f;
}

// The verdict on a step.

// The values whose sum a step is judged by, and the growth trackers of its loss scales.
struct StepValues {
  DeviceScalar values[kMostPacked];
  int* trackers[kMostPacked];
  u32 count;
  u32 tracker_count;
};

enum SpikeAction : int { kSkipSpike = 0, kClipSpike = 1, kRaiseSpike = 2 };

struct SpikeRule {
  float sigma;
  float window;
  float warmup;
  float least_deviation;  // as a fraction of the mean
  int action;  // a SpikeAction
};

struct StepStatistics {
  float mean;
  float variance;
  float steps;
  float held;  // 1 after a spike that must raise an error
};

constexpr u32 kJudgedNumbers = 6;
constexpr float kNoLimit = 3.4028235e38f;  // float32's largest number

inline bool is_number(float value) { return value - value == 0; }

// Writes kJudgedNumbers numbers to `judged`, and updates the statistics and the growth trackers.
inline void judge_values(
    const StepValues& values, const float* norm, const float* found_inf, StepStatistics* statistics,
    SpikeRule rule, float* judged) {
  float value = 0;
  for (u32 i = 0; i < values.count; ++i) value += float(read(values.values[i]));
  StepStatistics now = *statistics;
  const bool overflow = *found_inf > 0, held = now.held > 0, warm = now.steps >= rule.warmup;
  const float deviation = sqrtf(now.variance), least = rule.least_deviation * fabsf(now.mean);
  const float limit = now.mean + rule.sigma * (deviation > least ? deviation : least);
  const bool ordinary = value <= limit;  // false for a NaN
  const bool spike = warm && !overflow && !held && !ordinary;
  const bool clips = spike && rule.action == kClipSpike, skips = held || (spike && !clips);
  const float clipped = now.mean / (*norm + 1e-6f);
  const float factor = clips && clipped < 1.0f ? clipped : 1.0f;
  judged[0] = overflow || skips ? 1.0f : 0.0f;
  judged[1] = factor;  // what the gradients are multiplied by
  judged[2] = held && !overflow ? 2.0f : spike ? 1.0f : 0.0f;  // 2 for a step that is held back after a spike
  judged[3] = value;
  judged[4] = warm ? limit : kNoLimit;  // during warm-up, no step counts as a spike
  judged[5] = *norm * factor;
  const float learned = warm && !ordinary ? limit : value;
  if (!overflow && !held && is_number(learned)) {
    const float count = now.steps + 1 < rule.window ? now.steps + 1 : rule.window;
    const float change = learned - now.mean;
    now.variance = (1 - 1 / count) * (now.variance + change * change / count);
    now.mean += change / count;
    now.steps = count;
  }
  if (spike && rule.action == kRaiseSpike) now.held = 1;
  *statistics = now;
  // A step that is skipped without an overflow does not count for the growth of the scale.
  for (u32 i = 0; i < values.tracker_count; ++i) *values.trackers[i] -= skips && !overflow;
}

}  // namespace amp_plugin::cuda
