// An optimizer step over the tensors of a table: the tensors of a parameter, and how a rule is applied to
// them.
//
// A parameter has four rows, `table.count` apart. `address` and `out_address` of the rows are:
//
//   gradient, parameter              dtype and out_dtype are theirs; a bfloat16 parameter has a remainder
//   remainder, first counter         dtype is that of the counter
//   first state, second state        dtype is a StateType
//   third state, second counter      the second counter is a float32
//
// All tensors of a parameter are dense and have the same memory order. Gradients are divided in the pass that
// reads them.
#pragma once

#include "../csrc/rules/states.h"
#include "arithmetic.cuh"
#include "tensor_table.cuh"

namespace amp_plugin::cuda {

// The counters of a parameter before a step.
struct Counters {
  double value[kMostCounters] = {};

  __device__ bool operator==(const Counters& other) const {
    return value[0] == other.value[0] && value[1] == other.value[1];
  }
};

// The address of the code at `at`. A block of codes is followed by its unit, a float32.
__device__ inline u64 code_at(u64 address, u32 at) { return address + u64(at / 4 + at / kCodeBlock) * 4; }

struct Parameter {
  u64 grad, param, remainder, counter[kMostCounters];
  u64 states[kMostStates];
  u64 numel;
  u8 grad_type, counter_type, state_type;
  bool is_pair;  // the parameter is a bfloat16 with a remainder

  __device__ Parameter(const Table& table, u32 tensor) {
    const Row &first = table.rows[tensor], &second = table.rows[table.count + tensor];
    const Row &third = table.rows[2 * table.count + tensor], &fourth = table.rows[3 * table.count + tensor];
    grad = first.address, param = first.out_address;
    remainder = second.address, counter[0] = second.out_address, counter[1] = fourth.out_address;
    states[0] = third.address, states[1] = third.out_address, states[2] = fourth.address;
    numel = first.numel;
    grad_type = first.dtype, counter_type = second.dtype, state_type = third.dtype;
    is_pair = first.out_dtype == kBFloat16;
  }

  template <u32 kCount>
  __device__ Counters counters() const {
    Counters counters;
    for (u32 k = 0; k < kCount; ++k) counters.value[k] = read(counter_at(k));
    return counters;
  }
  template <u32 kCount>
  __device__ void write(const Counters& counters) const {
    for (u32 k = 0; k < kCount; ++k) cuda::write(counter_at(k), counters.value[k]);
  }
  __device__ DeviceScalar counter_at(u32 k) const {
    return {reinterpret_cast<const void*>(counter[k]), k == 0 && counter_type == kFloat64, 0};
  }

  // The bytes of an element. Codes have one, and the unit of a block in addition.
  __device__ u32 grad_bytes() const { return grad_type == kFloat32 ? 4 : 2; }
  __device__ u32 param_bytes() const { return is_pair ? 2 : 4; }
  __device__ u32 bytes_of_state(rules::StateKind kind) const {
    if (kind == rules::kWeight || state_type == kStateFloat32) return 4;
    return state_type == kStateBFloat16 ? 2 : 1;
  }
  // Moves to the element `at`, from which positions are then counted. It begins a block of codes.
  template <typename States>
  __device__ void start_at(u64 at) {
    grad += at * grad_bytes(), param += at * param_bytes(), remainder += at * 2;
    for (u32 k = 0; k < States::kCount; ++k) {
      const u32 bytes = bytes_of_state(States::kind(k));
      states[k] += bytes == 1 ? at / kCodeBlock * kCodeBlockBytes : at * bytes;
    }
  }
  // Return true if groups of `count` elements are aligned in every tensor.
  template <typename States>
  __device__ bool is_aligned(u32 count) const {
    u64 beyond = param & (param_bytes() * count - 1);
    if (is_pair) beyond |= remainder & (2 * count - 1);
    for (u32 k = 0; k < States::kCount; ++k)
      beyond |= states[k] & (bytes_of_state(States::kind(k)) * count - 1);
    return beyond == 0 && is_grad_aligned(count);
  }
  // Asks for the group at `at` of each tensor, so that it is in the L2 cache when it is loaded. States are
  // stored as codes, unless they are weights.
  template <typename States>
  __device__ void prefetch(u32 at) const {
    cuda::prefetch(grad + u64(at) * grad_bytes()), cuda::prefetch(param + u64(at) * param_bytes());
    if (is_pair) cuda::prefetch(remainder + u64(at) * 2);
    for (u32 k = 0; k < States::kCount; ++k)
      cuda::prefetch(States::kind(k) == rules::kWeight ? states[k] + u64(at) * 4 : code_at(states[k], at));
  }
  __device__ bool is_grad_aligned(u32 count) const { return (grad & (grad_bytes() * count - 1)) == 0; }
};

template <typename T, int kCount>
__device__ inline void store_lanes(u64 address, u32 at, const Lanes<kCount>& lanes) {
  store_packet(
      reinterpret_cast<Packet<T, kCount>*>(address + u64(at) * sizeof(T)), narrowed<T, kCount>(lanes.lane));
}

// Neighboring elements of 16 or 32 bits, as they are in memory. A step first loads everything in this form,
// and only then converts it. A conversion between two loads would delay the second load until the first one
// has arrived.
template <int kCount>
struct Raw {
  u32 word[kCount];

  __device__ u16 half(int i) const { return u16(word[i / 2] >> (16 * (i % 2))); }
};

template <typename T, int kCount>
__device__ inline void fill(Raw<kCount>& raw, u64 address) {
  const auto packet = load_packet(reinterpret_cast<const Packet<T, kCount>*>(address));
  memcpy(&raw, &packet, sizeof(packet));
}

template <int kCount>
__device__ inline Raw<kCount> load_raw(u64 address, u32 at, bool is_wide) {
  Raw<kCount> raw{};
  is_wide ? fill<Float32>(raw, address + u64(at) * 4) : fill<BFloat16>(raw, address + u64(at) * 2);
  return raw;
}

template <int kCount>
__device__ inline Lanes<kCount> widen_float32(const Raw<kCount>& raw) {
  return made<kCount>([&](int i) { return __uint_as_float(raw.word[i]); });
}

template <int kCount>
__device__ inline Lanes<kCount> widen_bfloat16(const Raw<kCount>& raw) {
  return made<kCount>([&](int i) { return __uint_as_float(u32(raw.half(i)) << 16); });
}

// Return true if a lane is a NaN. After this one test of a group, the code that follows can ignore NaNs.
template <int kCount>
__device__ inline bool any_nan(const Lanes<kCount>& lanes) {
  bool found = false;
  for (int i = 0; i < kCount; ++i) found |= lanes.lane[i] != lanes.lane[i];
  return found;
}

// All threads of a block take the same branch.
template <int kCount>
__device__ inline Raw<kCount> load_raw_grad(const Parameter& parameter, u32 at) {
  return load_raw<kCount>(parameter.grad, at, parameter.grad_type == kFloat32);
}

template <int kCount>
__device__ inline Lanes<kCount> widen_grad(const Parameter& parameter, const Raw<kCount>& raw) {
  if (parameter.grad_type == kFloat32) return widen_float32(raw);
  if (parameter.grad_type == kBFloat16) return widen_bfloat16(raw);
  return made<kCount>([&](int i) { return half_to_float(raw.half(i)); });
}

template <int kCount>
__device__ inline void store_grad(const Parameter& parameter, u32 at, const Lanes<kCount>& lanes) {
  switch (parameter.grad_type) {
    case kFloat16: return store_lanes<Float16, kCount>(parameter.grad, at, lanes);
    case kBFloat16: return store_lanes<BFloat16, kCount>(parameter.grad, at, lanes);
    default: return store_lanes<Float32, kCount>(parameter.grad, at, lanes);
  }
}

template <int kCount>
__device__ inline Lanes<kCount> join_pair(const Raw<kCount>& high, const Raw<kCount>& low) {
  return made<kCount>([&](int i) { return __uint_as_float(unpack_weight(high.half(i), low.half(i))); });
}

template <int kCount>
__device__ inline void store_pair(u64 high, u64 low, u32 at, const Lanes<kCount>& lanes) {
  Packet<BFloat16, kCount> highs, lows;  // the low halves are integers, moved as bits
  if (kCount == 1 || any_nan(lanes)) {
    for (int i = 0; i < kCount; ++i) {
      const u32 halves = pack_weight(__float_as_uint(lanes.lane[i]));
      highs.element[i].bits = u16(halves >> 16);
      lows.element[i].bits = u16(halves);
    }
  } else {
    for (int i = 0; i + 1 < kCount; i += 2) {
      const u32 first = __float_as_uint(lanes.lane[i]), second = __float_as_uint(lanes.lane[i + 1]);
      const u32 two_highs = __byte_perm(first + 0x8000u, second + 0x8000u, 0x7632);
      const u32 two_lows = __byte_perm(first, second, 0x5410);
      memcpy(&highs.element[i], &two_highs, sizeof(u32));
      memcpy(&lows.element[i], &two_lows, sizeof(u32));
    }
  }
  store_packet(reinterpret_cast<Packet<BFloat16, kCount>*>(high + u64(at) * 2), highs);
  store_packet(reinterpret_cast<Packet<BFloat16, kCount>*>(low + u64(at) * 2), lows);
}

template <int kCount>
struct RawParam {
  Raw<kCount> whole, low;
};

template <int kCount>
__device__ inline RawParam<kCount> load_raw_param(const Parameter& parameter, u32 at) {
  RawParam<kCount> raw{load_raw<kCount>(parameter.param, at, !parameter.is_pair), {}};
  if (parameter.is_pair) raw.low = load_raw<kCount>(parameter.remainder, at, false);
  return raw;
}

template <int kCount>
__device__ inline Lanes<kCount> widen_param(const Parameter& parameter, const RawParam<kCount>& raw) {
  return parameter.is_pair ? join_pair(raw.whole, raw.low) : widen_float32(raw.whole);
}

template <int kCount>
__device__ inline void store_param(const Parameter& parameter, u32 at, const Lanes<kCount>& lanes) {
  if (parameter.is_pair) return store_pair<kCount>(parameter.param, parameter.remainder, at, lanes);
  store_lanes<Float32, kCount>(parameter.param, at, lanes);
}

// Divides the elements of a gradient and writes them. A division by exactly 1 would change nothing, so
// nothing is written.
template <int kCount>
__device__ inline void divide_grad(
    const Parameter& parameter, u32 at, const Divisor& divisor, Lanes<kCount>& grad) {
  if (divisor.is_one()) return;
  grad = divisor.divide(grad);
  store_grad<kCount>(parameter, at, grad);
}

// kCount neighboring elements of one state, stored as float32 if `kIsFloat32` or the state is a weight, else
// as bfloat16. csrc/step_states.h describes how they are rounded.
template <int kCount, bool kIsFloat32>
struct PlainLanes {
  u64 address;
  rules::StateKind kind;
  Raw<kCount> raw;

  PlainLanes() = default;
  __device__ PlainLanes(u64 address, u32 at, rules::StateKind kind)
      : address(address), kind(kind), raw(load_raw<kCount>(address, at, is_float32())) {}

  __device__ bool is_float32() const { return kIsFloat32 || kind == rules::kWeight; }

  __device__ Lanes<kCount> decoded() const { return is_float32() ? widen_float32(raw) : widen_bfloat16(raw); }

  __device__ void store(const Lanes<kCount>& lanes, u32 at, u32 seed) const {
    if (is_float32()) return store_lanes<Float32, kCount>(address, at, lanes);
    Packet<BFloat16, kCount> packet;
    if (kind == rules::kSigned) {
      packet = narrowed<BFloat16, kCount>(lanes.lane);
    } else {
      const Draws draws(at / kCodeBlock, seed, kind);
      const u32 start = (draws.first + at % kCodeBlock) * (kStride << 8);
      for (int i = 0; i < kCount; ++i) {
        const u32 drawn = ((start + i * (kStride << 8)) & 0xff00u) | draws.low;
        packet.element[i].bits = u16((__float_as_uint(lanes.lane[i]) + drawn) >> 16);
      }
    }
    if (any_nan(lanes)) {
      for (int i = 0; i < kCount; ++i)
        if (lanes.lane[i] != lanes.lane[i]) packet.element[i].bits = 0x7fc0;
    }
    store_packet(reinterpret_cast<Packet<BFloat16, kCount>*>(address + u64(at) * 2), packet);
  }
};

// Applies the rule to kCount neighboring elements. All loads are issued before the first value is used. State
// is the form in which a state is stored: PlainLanes or CodedLanes.
template <int kCount, typename State, typename Rule>
__device__ void step_group(
    const Parameter& parameter, u32 at, const Divisor& divisor, const Rule& rule, u32 seed) {
  constexpr u32 kStates = Rule::States::kCount;
  const Raw<kCount> raw_grad = load_raw_grad<kCount>(parameter, at);
  const RawParam<kCount> raw_param = load_raw_param<kCount>(parameter, at);
  State stored[kStates + 1];
  for (u32 k = 0; k < kStates; ++k) stored[k] = State(parameter.states[k], at, Rule::States::kind(k));
  Lanes<kCount> grad = widen_grad(parameter, raw_grad), param = widen_param(parameter, raw_param);
  Lanes<kCount> states[kStates + 1];
  for (u32 k = 0; k < kStates; ++k) states[k] = stored[k].decoded();
  divide_grad<kCount>(parameter, at, divisor, grad);
  param = rule(param, grad, states);
  for (u32 k = 0; k < kStates; ++k) stored[k].store(states[k], at, seed);
  store_param<kCount>(parameter, at, param);
}

// Applies the rule to groups of kCount elements of [begin, end).
template <int kCount, bool kIsFloat32, typename Rule>
__device__ void step_range(
    const Parameter& parameter, u32 begin, u32 end, const Divisor& divisor, const Rule& rule, u32 seed) {
  for (u32 at = begin + threadIdx.x * kCount; at + kCount <= end; at += kThreads * kCount)
    step_group<kCount, PlainLanes<kCount, kIsFloat32>>(parameter, at, divisor, rule, seed);
}

constexpr int kGroup = 4;  // elements that one memory access moves

// The elements of a run of granules. Positions are counted from `begin`: a block steps far fewer than 2^32
// elements, and 32 bits take fewer instructions. Groups of kGroup elements end at `groups_end`, and single
// elements follow.
struct ElementRange {
  u64 begin;
  u32 groups_end, end;

  // If tensors are not aligned, all elements are moved one by one.
  __device__ ElementRange(u64 numel, u32 begin_granule, u32 end_granule, bool aligned) {
    const u64 stop = u64(end_granule) * kGranuleElements;
    begin = u64(begin_granule) * kGranuleElements;
    end = u32((stop < numel ? stop : numel) - begin);
    groups_end = aligned ? end - end % kGroup : 0;
  }
};

// kGroup neighboring elements of one state, stored as codes. Each warp has one block of codes;
// csrc/step_states.h describes the format and gives the same bits. The last thread of a warp, whose codes are
// next to the block's unit, loads and stores the unit. States that are weights are float32, and are loaded
// and stored as such.
struct CodedLanes {
  u64 codes;
  rules::StateKind kind;
  float unit = 0;
  u32 word;
  PlainLanes<kGroup, true> weight;  // used instead if the state is a weight

  CodedLanes() = default;
  __device__ CodedLanes(u64 address, u32 at, rules::StateKind kind) : kind(kind) {
    if (kind == rules::kWeight) {
      weight = PlainLanes<kGroup, true>(address, at, kind);
      return;
    }
    codes = code_at(address, at);
    word = __ldca(reinterpret_cast<const u32*>(codes));
    if (is_last_of_block(at)) unit = __ldca(reinterpret_cast<const float*>(codes + kGroup));
  }

  // Every thread of a warp must call this.
  __device__ Lanes<kGroup> decoded() const {
    if (kind == rules::kWeight) return weight.decoded();
    const float factor = __shfl_sync(0xffffffffu, unit, 31);
    const u32 moved = is_signed() ? word ^ 0x80808080u : word;  // adds 128, so that no code is negative
    return made<kGroup>([&](int i) {
      const float whole = __uint_as_float(byte_behind(0x4b000000u, moved, i)), code = whole - (kWhole + 128);
      const float root = fmaf(whole, factor, factor * -kWhole);  // rounded as the code times the factor
      return is_signed() ? code * fabsf(code) * factor : root * root;
    });
  }

  // Every thread of a warp must call this. Magnitudes are compared by their bits, so a NaN is the largest.
  __device__ void store(Lanes<kGroup> lanes, u32 at, u32 seed) const {
    if (kind == rules::kWeight) return weight.store(lanes, at, seed);
    if (!is_signed()) {
      if (!lanes.has_roots) root(lanes);
      memcpy(lanes.lane, lanes.root, sizeof(lanes.lane));
    }
    u32 most = 0, flips = 0x80808080u;
    for (int i = 0; i < kGroup; ++i) {
      const u32 bits = __float_as_uint(lanes.lane[i]) & (is_signed() ? 0x7fffffffu : 0xffffffffu);
      most = bits > most ? bits : most;
    }
    most = warp_max(most);
    const bool has_nan = most > 0x7f800000u;
    const float share = is_signed() ? float(1.0 / (127 * 127)) : float(1.0 / 255);
    const float limit = is_signed() ? kMostSigned : kMostRoot;
    float now = __uint_as_float(most) * share, scaled = now;
    if (most > __float_as_uint(is_signed() ? kLargeSigned : kMostRoot)) {
      // The block has very large numbers. They are clamped and scaled. In a block with a NaN every element is
      // decoded as a NaN, and a CPU gives the infinities and NaNs of a first moment the code -128.
      for (int i = 0; i < kGroup; ++i) {
        const float size = fabsf(lanes.lane[i]), clamped = fminf(size, limit) * kShrinks;
        if (has_nan && !is_finite(size)) flips ^= 0x80u << (8 * i);
        lanes.lane[i] = is_signed() ? copysignf(clamped, lanes.lane[i]) : clamped;
      }
      now = has_nan ? __uint_as_float(0x7fc00000u) : fminf(__uint_as_float(most), limit) * share;
      scaled = now * kShrinks;  // the NaN above is that of a CPU; a GPU's NaN has other bits
    }
    const float divisor = is_signed() ? scaled * 16384 : scaled;
    const float inverse = scaled > kLeastUnit ? moderate_inverse(divisor) : 0;
    const u32 out = is_signed() ? signed_codes(lanes, inverse) ^ flips
                                : square_codes(lanes, inverse, Draws(at / kCodeBlock, seed, kind), at);
    __stwb(reinterpret_cast<u32*>(codes), out);
    if (is_last_of_block(at)) __stwb(reinterpret_cast<float*>(codes + kGroup), now);
  }

 private:
  static constexpr float kLeastUnit = 0x1p-120f, kMostSigned = 0x1p127f, kMostRoot = 0x1p63f;
  static constexpr float kLargeSigned = 0x1p124f, kShrinks = 0x1p-32f;
  // 2^23: adding a number to it with rounding to zero drops the fraction
  static constexpr float kWhole = 8388608;

  __device__ bool is_signed() const { return kind == rules::kSigned; }
  __device__ static bool is_last_of_block(u32 at) { return at % kCodeBlock == kCodeBlock - kGroup; }
  // Codes are computed as multiples of 1/128. `inverse` is divided by 128^2, so the roots are below 1, and
  // the multiply-add that completes a root also saturates it. The NaN that moderate_root() gives for 0
  // becomes 0.
  __device__ static u32 signed_codes(const Lanes<kGroup>& lanes, float inverse) {
    u32 words[kGroup], bits[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const float root = __saturatef(moderate_root(fabsf(lanes.lane[i]) * inverse)) + 0.5f / 128;
      words[i] = __float_as_uint(__fadd_rz(root, kWhole / 128));
      bits[i] = __float_as_uint(lanes.lane[i]);
    }
    const u32 signs = bytes_of<11>(bits);
    // 128 more in each byte, so nothing is carried
    return (bytes_of<0>(words) ^ signs) - signs + 0x80808080u;
  }
  // The high byte of a draw counts as that many 256ths. Adding a number to 2^15 with rounding to zero leaves
  // its fraction 8 bits, so the sum has the code in its second byte. A root that is not 0 has a code of at
  // least 1.
  __device__ static u32 square_codes(const Lanes<kGroup>& lanes, float inverse, const Draws& draws, u32 at) {
    const u32 start = (draws.first + at % kCodeBlock) * kStride;
    u32 words[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const float least = __saturatef(lanes.lane[i] * 0x1p120f);
      const float code = fmaxf(fmaf(lanes.lane[i], inverse, draws.low * 0x1p-16f), least);
      const float draw = __uint_as_float(((start + i * kStride) & 0xffu) | 0x47000000u);
      words[i] = __float_as_uint(fminf(__fadd_rz(code, draw), __uint_as_float(0x4700ffffu)));
    }
    return bytes_of<1>(words);
  }
};

// Steps the elements of a group of codes one by one, if the group is not aligned or not whole. Not inlined,
// and with arguments by value, so that it takes no registers from the aligned groups.
template <typename Rule>
__device__ __noinline__ void step_group_alone(
    Parameter parameter, u32 at, u32 end, Divisor divisor, const Rule& rule, u32 seed) {
  constexpr u32 kStates = Rule::States::kCount;
  const auto is_weight = [](u32 k) { return Rule::States::kind(k) == rules::kWeight; };
  Lanes<kGroup> states[kStates + 1];
  CodedLanes coded[kStates + 1];
  for (u32 k = 0; k < kStates; ++k) {
    if (is_weight(k)) continue;
    coded[k] = CodedLanes(parameter.states[k], at, Rule::States::kind(k));
    states[k] = coded[k].decoded();
  }
  for (int i = 0; i < kGroup; ++i) {
    if (at + i >= end) continue;  // beyond the last element: the stored value is 0, and stays 0
    Lanes<1> grad = widen_grad(parameter, load_raw_grad<1>(parameter, at + i));
    Lanes<1> param = widen_param(parameter, load_raw_param<1>(parameter, at + i));
    divide_grad<1>(parameter, at + i, divisor, grad);
    Lanes<1> values[kStates + 1];
    for (u32 k = 0; k < kStates; ++k)
      values[k] = is_weight(k) ? widen_float32(load_raw<1>(parameter.states[k], at + i, true))
                               : Lanes<1>(states[k].lane[i]);
    param = rule(param, grad, values);
    for (u32 k = 0; k < kStates; ++k) {
      states[k].lane[i] = values[k].lane[0];
      if (is_weight(k)) store_lanes<Float32, 1>(parameter.states[k], at + i, values[k]);
    }
    store_param<1>(parameter, at + i, param);
  }
  for (u32 k = 0; k < kStates; ++k)
    if (!is_weight(k)) coded[k].store(states[k], at, seed);
}

// Does what step_range() does, for states stored as codes. A warp takes one block of codes, and each thread
// kGroup neighboring elements.
template <typename Rule>
__device__ void step_codes(
    const Parameter& parameter, const ElementRange& range, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  static_assert(kCodeBlock == 32 * kGroup && kGranuleElements % kCodeBlock == 0);
  const u32 whole_blocks_end = range.groups_end / kCodeBlock * kCodeBlock;
  u32 at = threadIdx.x * kGroup;  // all threads of a warp leave a loop together
  const auto step_whole_blocks = [&](bool is_pair, u8 grad_type) {
    Parameter known = parameter;
    known.is_pair = is_pair, known.grad_type = grad_type;
    for (u32 next; at < whole_blocks_end; at = next) {
      next = at + kThreads * kGroup;
      known.prefetch<typename Rule::States>(next < whole_blocks_end ? next : at);
      step_group<kGroup, CodedLanes>(known, at, divisor, rule, seed);
    }
  };
  // The compiler makes a loop of its own for the usual types of a pair, without branches for other types.
  if (parameter.is_pair && parameter.grad_type == kBFloat16) step_whole_blocks(true, kBFloat16);
  step_whole_blocks(parameter.is_pair, parameter.grad_type);
  for (; at / kCodeBlock * kCodeBlock < range.end; at += kThreads * kGroup)
    step_group_alone<Rule>(parameter, at, range.end, divisor, rule, seed);
}

template <bool kIsFloat32, typename Rule>
__device__ void step_groups(
    const Parameter& parameter, const ElementRange& range, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  step_range<kGroup, kIsFloat32>(parameter, 0, range.groups_end, divisor, rule, seed);
  step_range<1, kIsFloat32>(parameter, range.groups_end, range.end, divisor, rule, seed);
}

// Applies the rule to a run of granules of kGranuleElements elements. `seed` is the seed of random rounding.
template <typename Rule>
__device__ void step_piece(
    Parameter parameter, u32 begin_granule, u32 end_granule, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  const bool aligned = parameter.is_aligned<typename Rule::States>(kGroup);
  const ElementRange range(parameter.numel, begin_granule, end_granule, aligned);
  parameter.start_at<typename Rule::States>(range.begin);
  seed = seed_from(u32(range.begin / kCodeBlock), seed);
  if constexpr (Rule::States::kCount > 0) {  // all threads of a block take the same branch
    if (parameter.state_type == kStateCodes) return step_codes(parameter, range, divisor, rule, seed);
    if (parameter.state_type == kStateBFloat16)
      return step_groups<false>(parameter, range, divisor, rule, seed);
  }
  step_groups<true>(parameter, range, divisor, rule, seed);
}

template <int kCount>
__device__ void divide_range(const Parameter& parameter, u32 begin, u32 end, const Divisor& divisor) {
  for (u32 at = begin + threadIdx.x * kCount; at + kCount <= end; at += kThreads * kCount) {
    Lanes<kCount> grad = widen_grad(parameter, load_raw_grad<kCount>(parameter, at));
    divide_grad<kCount>(parameter, at, divisor, grad);
  }
}

// Carries out a skipped step: it divides the gradients and writes nothing else.
__device__ inline void divide_all(const Table& table, const Divisor& divisor) {
  if (divisor.is_one()) return;
  for_each_piece(table, [&](const Row&, u32 tensor, u32 begin_granule, u32 end_granule) {
    Parameter parameter(table, tensor);
    const ElementRange range(parameter.numel, begin_granule, end_granule, parameter.is_grad_aligned(kGroup));
    parameter.start_at<rules::StateList<>>(range.begin);
    divide_range<kGroup>(parameter, 0, range.groups_end, divisor);
    divide_range<1>(parameter, range.groups_end, range.end, divisor);
  });
}

// for_each_pair() calls `visit(master, high, low, at, group)` for groups of kCount elements of
// stored weights. A weight has two rows, `table.count` apart: the first has the master and the high half, the
// second the low half.
template <int kCount>
struct Group {};

template <typename Visit>
__device__ void for_each_pair(const Table& table, Visit&& visit) {
  for_each_piece(table, [&](const Row& row, u32 tensor, u32 begin_granule, u32 end_granule) {
    u64 master = row.address, high = row.out_address, low = table.rows[table.count + tensor].address;
    const bool aligned = master % (4 * kGroup) == 0 && (high | low) % (2 * kGroup) == 0;
    const ElementRange range(row.numel, begin_granule, end_granule, aligned);
    master += range.begin * 4, high += range.begin * 2, low += range.begin * 2;
    for (u32 at = threadIdx.x * kGroup; at < range.groups_end; at += kThreads * kGroup)
      visit(master, high, low, at, Group<kGroup>{});
    for (u32 at = range.groups_end + threadIdx.x; at < range.end; at += kThreads)
      visit(master, high, low, at, Group<1>{});
  });
}

}  // namespace amp_plugin::cuda
