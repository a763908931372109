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

  // Return true if groups of `count` elements, from `at` on, are aligned in every tensor.
  template <typename States>
  __device__ bool is_aligned(u64 at, u32 count) const {
    u64 wide = is_pair ? 0 : param, halves = is_pair ? param | remainder : 0;
    for (u32 k = 0; k < States::kCount; ++k) {
      if (States::kind(k) == rules::kWeight || state_type == kStateFloat32) {
        wide |= states[k];
      } else if (state_type == kStateBFloat16) {
        halves |= states[k];
      }
    }
    return wide % (4 * count) == 0 && halves % (2 * count) == 0 && is_grad_aligned(at, count);
  }
  __device__ bool is_grad_aligned(u64 at, u32 count) const {
    return grad % ((grad_type == kFloat32 ? 4 : 2) * count) == 0 && at % count == 0;
  }
};

template <typename T, int kCount>
__device__ inline Lanes<kCount> load_lanes(u64 address, u64 at) {
  const auto packet = load_packet(reinterpret_cast<const Packet<T, kCount>*>(address + at * sizeof(T)));
  return made<kCount>([&](int i) { return T::widen(packet.element[i]); });
}

template <typename T, int kCount>
__device__ inline void store_lanes(u64 address, u64 at, const Lanes<kCount>& lanes) {
  store_packet(
      reinterpret_cast<Packet<T, kCount>*>(address + at * sizeof(T)), narrowed<T, kCount>(lanes.lane));
}

// Neighboring elements of 16 or 32 bits, as they are in memory. A step first loads everything in this form,
// and only then converts it. A conversion between two loads would delay the second load until the first one
// has arrived.
template <int kCount>
struct Raw {
  u32 word[kCount];

  __device__ u16 half(int i) const { return u16(word[i / 2] >> (16 * (i % 2))); }
};

template <int kCount>
__device__ inline Raw<kCount> load_raw(u64 address, u64 at, bool is_wide) {
  Raw<kCount> raw{};
  if (is_wide) {
    const auto packet = load_packet(reinterpret_cast<const Packet<Float32, kCount>*>(address + 4 * at));
    memcpy(&raw, &packet, sizeof(packet));
  } else {
    const auto packet = load_packet(reinterpret_cast<const Packet<BFloat16, kCount>*>(address + 2 * at));
    memcpy(&raw, &packet, sizeof(packet));
  }
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
#pragma unroll
  for (int i = 0; i < kCount; ++i) found |= lanes.lane[i] != lanes.lane[i];
  return found;
}

// All threads of a block take the same branch.
template <int kCount>
__device__ inline Raw<kCount> load_raw_grad(const Parameter& parameter, u64 at) {
  return load_raw<kCount>(parameter.grad, at, parameter.grad_type == kFloat32);
}

template <int kCount>
__device__ inline Lanes<kCount> widen_grad(const Parameter& parameter, const Raw<kCount>& raw) {
  if (parameter.grad_type == kFloat32) return widen_float32(raw);
  if (parameter.grad_type == kBFloat16) return widen_bfloat16(raw);
  return made<kCount>([&](int i) { return half_to_float(raw.half(i)); });
}

template <int kCount>
__device__ inline Lanes<kCount> load_grad(const Parameter& parameter, u64 at) {
  return widen_grad(parameter, load_raw_grad<kCount>(parameter, at));
}

template <int kCount>
__device__ inline void store_grad(const Parameter& parameter, u64 at, const Lanes<kCount>& lanes) {
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
__device__ inline void store_pair(u64 high, u64 low, u64 at, const Lanes<kCount>& lanes) {
  Packet<BFloat16, kCount> highs, lows;  // the low halves are integers, moved as bits
  if (any_nan(lanes)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32 halves = pack_weight(__float_as_uint(lanes.lane[i]));
      highs.element[i].bits = u16(halves >> 16);
      lows.element[i].bits = u16(halves);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32 bits = __float_as_uint(lanes.lane[i]);
      highs.element[i].bits = u16((bits + 0x8000u) >> 16);
      lows.element[i].bits = u16(bits);
    }
  }
  store_packet(reinterpret_cast<Packet<BFloat16, kCount>*>(high + 2 * at), highs);
  store_packet(reinterpret_cast<Packet<BFloat16, kCount>*>(low + 2 * at), lows);
}

template <int kCount>
struct RawParam {
  Raw<kCount> whole, low;
};

template <int kCount>
__device__ inline RawParam<kCount> load_raw_param(const Parameter& parameter, u64 at) {
  RawParam<kCount> raw{load_raw<kCount>(parameter.param, at, !parameter.is_pair), {}};
  if (parameter.is_pair) raw.low = load_raw<kCount>(parameter.remainder, at, false);
  return raw;
}

template <int kCount>
__device__ inline Lanes<kCount> widen_param(const Parameter& parameter, const RawParam<kCount>& raw) {
  if (parameter.is_pair) return join_pair(raw.whole, raw.low);
  return widen_float32(raw.whole);
}

template <int kCount>
__device__ inline Lanes<kCount> load_param(const Parameter& parameter, u64 at) {
  return widen_param(parameter, load_raw_param<kCount>(parameter, at));
}

template <int kCount>
__device__ inline void store_param(const Parameter& parameter, u64 at, const Lanes<kCount>& lanes) {
  if (parameter.is_pair) return store_pair<kCount>(parameter.param, parameter.remainder, at, lanes);
  store_lanes<Float32, kCount>(parameter.param, at, lanes);
}

// Divides the elements of a gradient and writes them. A division by exactly 1 would change nothing, so
// nothing is written.
template <int kCount>
__device__ inline void divide_grad(
    const Parameter& parameter, u64 at, const Divisor& divisor, Lanes<kCount>& grad) {
  if (divisor.is_one()) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) grad.lane[i] = divisor.divide(grad.lane[i]);
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
  __device__ PlainLanes(u64 address, u64 at, rules::StateKind kind)
      : address(address), kind(kind), raw(load_raw<kCount>(address, at, is_float32())) {}

  __device__ bool is_float32() const { return kIsFloat32 || kind == rules::kWeight; }

  __device__ Lanes<kCount> decoded() const { return is_float32() ? widen_float32(raw) : widen_bfloat16(raw); }

  __device__ void store(const Lanes<kCount>& lanes, u64 at, u32 seed) const {
    if (is_float32()) return store_lanes<Float32, kCount>(address, at, lanes);
    Packet<BFloat16, kCount> packet;
    if (kind == rules::kSigned) {
      packet = narrowed<BFloat16, kCount>(lanes.lane);
    } else {
      const Draws draws(u32(at / kCodeBlock), seed, kind);
      const u32 start = (draws.first + u32(at % kCodeBlock)) * (kStride << 8);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const u32 drawn = ((start + i * (kStride << 8)) & 0xff00u) | draws.low;
        packet.element[i].bits = u16((__float_as_uint(lanes.lane[i]) + drawn) >> 16);
      }
    }
    if (any_nan(lanes)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (lanes.lane[i] != lanes.lane[i]) packet.element[i].bits = 0x7fc0;
    }
    store_packet(reinterpret_cast<Packet<BFloat16, kCount>*>(address + 2 * at), packet);
  }
};

// Applies the rule to kCount neighboring elements. All loads are issued before the first value is used. State
// is the form in which a state is stored: PlainLanes or CodedLanes.
template <int kCount, typename State, typename Rule>
__device__ void step_group(
    const Parameter& parameter, u64 at, const Divisor& divisor, const Rule& rule, u32 seed) {
  constexpr u32 kStates = Rule::States::kCount;
  const Raw<kCount> raw_grad = load_raw_grad<kCount>(parameter, at);
  const RawParam<kCount> raw_param = load_raw_param<kCount>(parameter, at);
  State stored[kStates + 1];
#pragma unroll
  for (u32 k = 0; k < kStates; ++k) stored[k] = State(parameter.states[k], at, Rule::States::kind(k));
  Lanes<kCount> grad = widen_grad(parameter, raw_grad), param = widen_param(parameter, raw_param);
  Lanes<kCount> states[kStates + 1];
#pragma unroll
  for (u32 k = 0; k < kStates; ++k) states[k] = stored[k].decoded();
  divide_grad<kCount>(parameter, at, divisor, grad);
  param = rule(param, grad, states);
#pragma unroll
  for (u32 k = 0; k < kStates; ++k) stored[k].store(states[k], at, seed);
  store_param<kCount>(parameter, at, param);
}

// Applies the rule to groups of kCount elements of [begin, end).
template <int kCount, bool kIsFloat32, typename Rule>
__device__ void step_range(
    const Parameter& parameter, u64 begin, u64 end, const Divisor& divisor, const Rule& rule, u32 seed) {
  for (u64 at = begin + u64(threadIdx.x) * kCount; at + kCount <= end; at += u64(kThreads) * kCount)
    step_group<kCount, PlainLanes<kCount, kIsFloat32>>(parameter, at, divisor, rule, seed);
}

constexpr int kGroup = 4;  // elements that one memory access moves

// The elements of a run of granules. Groups of kGroup elements end at `groups_end`, and single elements
// follow.
struct ElementRange {
  u64 begin, groups_end, end;

  __device__ ElementRange(u64 numel, u32 begin_granule, u32 end_granule) {
    const u64 stop = u64(end_granule) * kGranuleElements;
    begin = u64(begin_granule) * kGranuleElements;
    end = stop < numel ? stop : numel;
    groups_end = end - (end - begin) % kGroup;
  }
  // If tensors are not aligned, all elements are moved one by one.
  __device__ void only_if(bool aligned) {
    if (!aligned) groups_end = begin;
  }
};

// kGroup neighboring elements of one state, stored as codes. Each warp has one block of codes;
// csrc/step_states.h describes the format and gives the same bits. States that are weights are float32, and
// are loaded and stored as such.
struct CodedLanes {
  u64 codes;
  rules::StateKind kind;
  float unit;
  Packet<u8, kGroup> packet;
  PlainLanes<kGroup, true> weight;  // used instead if the state is a weight

  CodedLanes() = default;
  __device__ CodedLanes(u64 address, u64 at, rules::StateKind kind) : kind(kind) {
    if (kind == rules::kWeight) {
      weight = PlainLanes<kGroup, true>(address, at, kind);
      return;
    }
    codes = address + (at / kCodeBlock * (kCodeBlockBytes - kCodeBlock) + at);
    unit = load_packet(unit_at(at)).element[0].value;
    packet = load_packet(reinterpret_cast<const Packet<u8, kGroup>*>(codes));
  }

  __device__ Lanes<kGroup> decoded() const {
    if (kind == rules::kWeight) return weight.decoded();
    u32 word;
    memcpy(&word, &packet, sizeof(word));
    if (is_signed()) word ^= 0x80808080u;  // adds 128, so that no code is negative
    const float offset = is_signed() ? kWhole + 128 : kWhole;
    return made<kGroup>([&](int i) {
      const float code = __uint_as_float(byte_behind(0x4b000000u, word, i)) - offset;
      const float root = code * unit;
      return is_signed() ? code * fabsf(code) * unit : root * root;
    });
  }

  // Every thread of a warp must call this. Magnitudes are compared by their bits, so a NaN is the largest.
  __device__ void store(Lanes<kGroup> lanes, u64 at, u32 seed) const {
    if (kind == rules::kWeight) return weight.store(lanes, at, seed);
    if (!is_signed()) take_roots(lanes);
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const u32 bits = __float_as_uint(lanes.lane[i]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    most = warp_max(most);
    const bool has_nan = most > 0x7f800000u;
    float now = at_most(__uint_as_float(most), kMostSigned) *
        (is_signed() ? float(1.0 / (127 * 127)) : float(1.0 / 255));
    const float inverse = now > kLeastUnit ? moderate_inverse(now) : 0;
    Packet<u8, kGroup> out;
    const Draws draws(u32(at / kCodeBlock), seed, kind);
    const u32 start = (draws.first + u32(at % kCodeBlock)) * kStride;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      out.element[i] = is_signed()
          ? signed_code(lanes.lane[i], inverse)
          : square_code(lanes.lane[i], inverse, draws.low * 0x1p-16f, start + i * kStride);
    if (has_nan) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) out.element[i] = code_beside_nan(lanes.lane[i], out.element[i]);
      now = __uint_as_float(0x7fc00000u);  // the NaN that a CPU stores; a GPU's NaN has other bits
    }
    store_packet(reinterpret_cast<Packet<u8, kGroup>*>(codes), out);
    __syncwarp();  // wait until all threads have read the unit
    if (at % kCodeBlock == 0) store_packet(unit_at(at), Packet<Float32, 1>{{now}});
  }

 private:
  static constexpr float kLeastUnit = 0x1p-120f, kMostSigned = 0x1p127f, kMostRoot = 0x1p63f;
  // 2^23: adding a number to it with rounding to zero drops the fraction
  static constexpr float kWhole = 8388608;

  __device__ bool is_signed() const { return kind == rules::kSigned; }
  __device__ Packet<Float32, 1>* unit_at(u64 at) const {
    return reinterpret_cast<Packet<Float32, 1>*>(codes + (kCodeBlock - u32(at % kCodeBlock)));
  }
  __device__ static void take_roots(Lanes<kGroup>& lanes) {
    if (!lanes.has_roots) root(lanes);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) lanes.lane[i] = at_most(lanes.root[i], kMostRoot);
  }
  // a NaN stays
  __device__ static float at_most(float value, float most) { return value > most ? most : value; }
  __device__ static u8 signed_code(float value, float inverse) {
    const float root = fminf(moderate_root(fmaxf(fabsf(value) * inverse, 0x1p-100f)) + 0.5f, 127.0f);
    const u32 code = __float_as_uint(__fadd_rz(root, kWhole));
    const u32 sign = u32(int(__float_as_uint(value)) >> 31);
    return u8((code ^ sign) - sign);
  }
  // The high byte of the draw, 0 to 255, counts as that many 256ths.
  __device__ static u8 square_code(float root, float inverse, float low, u32 draw) {
    const float high = fmaf(__uint_as_float((draw & 0xffu) | 0x4b000000u), 0x1p-8f, -kWhole * 0x1p-8f);
    const float code = fmaf(root, inverse, low) + high;
    const float least = root != 0 ? 1.0f : 0.0f;
    return u8(__float_as_uint(__fadd_rz(fminf(fmaxf(code, least), 255.0f), kWhole)));
  }
  // The code of an element whose block contains a NaN. The unit of the block is then a NaN, so every element
  // is decoded as one.
  __device__ u8 code_beside_nan(float value, u8 code) const {
    if (!is_signed()) return code;
    return fabsf(value) * 0 == 0 ? code : 0x80;
  }
};

// Steps the elements of a group of codes one by one, if the group is not aligned or not whole. Not inlined,
// and with arguments by value, so that it takes no registers from the aligned groups.
template <typename Rule>
__device__ __noinline__ void step_group_alone(
    Parameter parameter, u64 at, u64 end, Divisor divisor, const Rule& rule, u32 seed) {
  constexpr u32 kStates = Rule::States::kCount;
  const auto is_weight = [](u32 k) { return Rule::States::kind(k) == rules::kWeight; };
  Lanes<kGroup> states[kStates + 1];
  CodedLanes coded[kStates + 1];
#pragma unroll
  for (u32 k = 0; k < kStates; ++k) {
    if (is_weight(k)) continue;
    coded[k] = CodedLanes(parameter.states[k], at, Rule::States::kind(k));
    states[k] = coded[k].decoded();
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (at + i >= end) continue;  // beyond the last element: the stored value is 0, and stays 0
    Lanes<1> grad = load_grad<1>(parameter, at + i), param = load_param<1>(parameter, at + i);
    divide_grad<1>(parameter, at + i, divisor, grad);
    Lanes<1> values[kStates + 1];
#pragma unroll
    for (u32 k = 0; k < kStates; ++k)
      values[k] =
          is_weight(k) ? load_lanes<Float32, 1>(parameter.states[k], at + i) : Lanes<1>(states[k].lane[i]);
    param = rule(param, grad, values);
#pragma unroll
    for (u32 k = 0; k < kStates; ++k) {
      states[k].lane[i] = values[k].lane[0];
      if (is_weight(k)) store_lanes<Float32, 1>(parameter.states[k], at + i, values[k]);
    }
    store_param<1>(parameter, at + i, param);
  }
#pragma unroll
  for (u32 k = 0; k < kStates; ++k)
    if (!is_weight(k)) coded[k].store(states[k], at, seed);
}

// Does what step_range() does, for states stored as codes. A warp takes one block of codes, and each thread
// kGroup neighboring elements.
template <typename Rule>
__device__ void step_codes(
    const Parameter& parameter, const ElementRange& range, bool aligned, const Divisor& divisor,
    const Rule& rule, u32 seed) {
  constexpr u32 kWarp = 32;
  static_assert(kCodeBlock == kWarp * kGroup && kGranuleElements % kCodeBlock == 0);
  const u64 first = range.begin + u64(threadIdx.x / kWarp) * kCodeBlock;
  for (u64 block = first; block < range.end; block += kThreads / kWarp * kCodeBlock) {
    const u64 at = block + threadIdx.x % kWarp * kGroup;
    if (!aligned || block + kCodeBlock > range.end) {  // all threads of a warp take the same branch
      step_group_alone<Rule>(parameter, at, range.end, divisor, rule, seed);
    } else {
      step_group<kGroup, CodedLanes>(parameter, at, divisor, rule, seed);
    }
  }
}

template <bool kIsFloat32, typename Rule>
__device__ void step_groups(
    const Parameter& parameter, const ElementRange& range, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  step_range<kGroup, kIsFloat32>(parameter, range.begin, range.groups_end, divisor, rule, seed);
  step_range<1, kIsFloat32>(parameter, range.groups_end, range.end, divisor, rule, seed);
}

// Applies the rule to a run of granules of kGranuleElements elements. `seed` is the seed of random rounding.
template <typename Rule>
__device__ void step_piece(
    const Parameter& parameter, u32 begin_granule, u32 end_granule, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  ElementRange range(parameter.numel, begin_granule, end_granule);
  const bool aligned = parameter.is_aligned<typename Rule::States>(range.begin, kGroup);
  range.only_if(aligned);
  if constexpr (Rule::States::kCount > 0) {  // all threads of a block take the same branch
    if (parameter.state_type == kStateCodes)
      return step_codes(parameter, range, aligned, divisor, rule, seed);
    if (parameter.state_type == kStateBFloat16)
      return step_groups<false>(parameter, range, divisor, rule, seed);
  }
  step_groups<true>(parameter, range, divisor, rule, seed);
}

template <int kCount>
__device__ void divide_range(const Parameter& parameter, u64 begin, u64 end, const Divisor& divisor) {
  for (u64 at = begin + u64(threadIdx.x) * kCount; at + kCount <= end; at += u64(kThreads) * kCount) {
    Lanes<kCount> grad = load_grad<kCount>(parameter, at);
    divide_grad<kCount>(parameter, at, divisor, grad);
  }
}

// Carries out a skipped step: it divides the gradients and writes nothing else.
__device__ inline void divide_all(const Table& table, const Divisor& divisor) {
  if (divisor.is_one()) return;
  for_each_piece(table, [&](const Row&, u32 tensor, u32 begin_granule, u32 end_granule) {
    const Parameter parameter(table, tensor);
    ElementRange range(parameter.numel, begin_granule, end_granule);
    range.only_if(parameter.is_grad_aligned(range.begin, kGroup));
    divide_range<kGroup>(parameter, range.begin, range.groups_end, divisor);
    divide_range<1>(parameter, range.groups_end, range.end, divisor);
  });
}

// for_each_pair() calls `visit(master, high, low, at, group)` for groups of `group`'s kCount elements of
// stored weights. A weight has two rows, `table.count` apart: the first has the master and the high half, the
// second the low half.
template <int kElements>
struct Group {
  static constexpr int kCount = kElements;
};

template <typename Visit>
__device__ void for_each_pair(const Table& table, Visit&& visit) {
  for_each_piece(table, [&](const Row& row, u32 tensor, u32 begin_granule, u32 end_granule) {
    const u64 master = row.address, high = row.out_address, low = table.rows[table.count + tensor].address;
    ElementRange range(row.numel, begin_granule, end_granule);
    range.only_if(master % (4 * kGroup) == 0 && (high | low) % (2 * kGroup) == 0);
    for (u64 at = range.begin + threadIdx.x * kGroup; at < range.groups_end; at += u64(kThreads) * kGroup)
      visit(master, high, low, at, Group<kGroup>{});
    for (u64 at = range.groups_end + threadIdx.x; at < range.end; at += kThreads)
      visit(master, high, low, at, Group<1>{});
  });
}

}  // namespace amp_plugin::cuda
