// An optimizer's step over the tensors of a table: what a parameter has, and how its elements move.
//
// A parameter has four rows, `table.count` apart:
//
//   address, out_address     gradient, parameter     dtype, out_dtype: theirs; a bfloat16 has a remainder
//   address, out_address     remainder, step counter                      dtype: the counter's
//   address, out_address     first state, second state                   dtype: a StateType
//   address                  third state
//
// All tensors of a parameter are dense and ordered alike in memory. Gradients are divided in the pass that
// reads them.
#pragma once

#include "tensor_table.cuh"

namespace amp_plugin::cuda {

constexpr u32 kMostStates = 3;

struct Parameter {
  u64 grad, param, remainder, step;
  u64 states[kMostStates];
  u64 numel;
  u8 grad_type, step_type, state_type;
  bool is_pair;  // a bfloat16 and its remainder

  __device__ Parameter(const Table& table, u32 tensor) {
    const Row &first = table.rows[tensor], &second = table.rows[table.count + tensor];
    const Row &third = table.rows[2 * table.count + tensor], &fourth = table.rows[3 * table.count + tensor];
    grad = first.address, param = first.out_address;
    remainder = second.address, step = second.out_address;
    states[0] = third.address, states[1] = third.out_address, states[2] = fourth.address;
    numel = first.numel;
    grad_type = first.dtype, step_type = second.dtype, state_type = third.dtype;
    is_pair = first.out_dtype == kBFloat16;
  }

  __device__ double steps() const {
    return read(DeviceScalar{reinterpret_cast<const void*>(step), is_double(), 0});
  }
  __device__ void count_step() const {
    if (is_double()) {
      *reinterpret_cast<double*>(step) += 1;
    } else {
      *reinterpret_cast<float*>(step) += 1;
    }
  }
  __device__ bool is_double() const { return step_type == kFloat64; }

  // Whether groups of `count` elements from `at` on are aligned in every tensor.
  __device__ bool is_aligned(u64 at, u32 count) const {
    const u64 all_states = states[0] | states[1] | states[2];
    const u64 wide = (is_pair ? 0 : param) | (state_type == kStateFloat32 ? all_states : 0);
    const u64 halves = (is_pair ? param | remainder : 0) | (state_type == kStateBFloat16 ? all_states : 0);
    return wide % (4 * count) == 0 && halves % (2 * count) == 0 && is_grad_aligned(at, count);
  }
  __device__ bool is_grad_aligned(u64 at, u32 count) const {
    return grad % ((grad_type == kFloat32 ? 4 : 2) * count) == 0 && at % count == 0;
  }
};

// `kCount` neighbours as float32.
template <int kCount>
struct Lanes {
  float lane[kCount];
};

template <typename T, int kCount>
__device__ inline Lanes<kCount> load_lanes(u64 address, u64 at) {
  const auto packet = load_packet(reinterpret_cast<const Packet<T, kCount>*>(address + at * sizeof(T)));
  Lanes<kCount> lanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) lanes.lane[i] = T::widen(packet.element[i]);
  return lanes;
}

template <typename T, int kCount>
__device__ inline void store_lanes(u64 address, u64 at, const Lanes<kCount>& lanes) {
  Packet<T, kCount> packet;
#pragma unroll
  for (int i = 0; i < kCount; ++i) packet.element[i] = T::narrow(lanes.lane[i]);
  store_packet(reinterpret_cast<Packet<T, kCount>*>(address + at * sizeof(T)), packet);
}

// The same branch for all threads of a block.
template <int kCount>
__device__ inline Lanes<kCount> load_grad(const Parameter& parameter, u64 at) {
  switch (parameter.grad_type) {
    case kFloat16: return load_lanes<Float16, kCount>(parameter.grad, at);
    case kBFloat16: return load_lanes<BFloat16, kCount>(parameter.grad, at);
    default: return load_lanes<Float32, kCount>(parameter.grad, at);
  }
}

template <int kCount>
__device__ inline void store_grad(const Parameter& parameter, u64 at, const Lanes<kCount>& lanes) {
  switch (parameter.grad_type) {
    case kFloat16: return store_lanes<Float16, kCount>(parameter.grad, at, lanes);
    case kBFloat16: return store_lanes<BFloat16, kCount>(parameter.grad, at, lanes);
    default: return store_lanes<Float32, kCount>(parameter.grad, at, lanes);
  }
}

// 16 bits as they are.
struct Bits16 {
  u16 bits;
};

template <int kCount>
__device__ inline Lanes<kCount> load_pair(u64 high, u64 low, u64 at) {
  const auto highs = load_packet(reinterpret_cast<const Packet<Bits16, kCount>*>(high + 2 * at));
  const auto lows = load_packet(reinterpret_cast<const Packet<Bits16, kCount>*>(low + 2 * at));
  Lanes<kCount> lanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    lanes.lane[i] = __uint_as_float(unpack_weight(highs.element[i].bits, lows.element[i].bits));
  return lanes;
}

template <int kCount>
__device__ inline void store_pair(u64 high, u64 low, u64 at, const Lanes<kCount>& lanes) {
  Packet<Bits16, kCount> highs, lows;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const u32 halves = pack_weight(__float_as_uint(lanes.lane[i]));
    highs.element[i].bits = u16(halves >> 16);
    lows.element[i].bits = u16(halves & 0xffffu);
  }
  store_packet(reinterpret_cast<Packet<Bits16, kCount>*>(high + 2 * at), highs);
  store_packet(reinterpret_cast<Packet<Bits16, kCount>*>(low + 2 * at), lows);
}

template <int kCount>
__device__ inline Lanes<kCount> load_param(const Parameter& parameter, u64 at) {
  if (parameter.is_pair) return load_pair<kCount>(parameter.param, parameter.remainder, at);
  return load_lanes<Float32, kCount>(parameter.param, at);
}

template <int kCount>
__device__ inline void store_param(const Parameter& parameter, u64 at, const Lanes<kCount>& lanes) {
  if (parameter.is_pair) return store_pair<kCount>(parameter.param, parameter.remainder, at, lanes);
  store_lanes<Float32, kCount>(parameter.param, at, lanes);
}

// Division by a number that is the same for all: as in csrc/step_weights.h, to the bit.
struct Divisor {
  float divisor, inverse;

  Divisor() = default;
  __device__ explicit Divisor(float divisor) : divisor(divisor), inverse(1 / divisor) {}
  __device__ bool is_one() const { return divisor == 1; }

  __device__ float divide(float x) const {
    const float quotient = x * inverse;
    const float rest = fmaf(quotient, -divisor, x);
    const float corrected = fmaf(rest, inverse, quotient);
    return rest - rest == 0 && rest != 0 ? corrected : quotient;
  }
};

// Divide a gradient's elements, and write them; by exactly 1, which nobody can see, nothing is written.
template <int kCount>
__device__ inline void divide_grad(
    const Parameter& parameter, u64 at, const Divisor& divisor, Lanes<kCount>& grad) {
  if (divisor.is_one()) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) grad.lane[i] = divisor.divide(grad.lane[i]);
  store_grad<kCount>(parameter, at, grad);
}

// States as they are, and in bfloat16; csrc/step_states.h says how they are rounded.
struct Float32States {
  template <int kCount>
  __device__ static Lanes<kCount> load(u64 address, u64 at) {
    return load_lanes<Float32, kCount>(address, at);
  }
  template <int kCount>
  __device__ static void store(u64 address, u64 at, const Lanes<kCount>& lanes, u32, u32) {
    store_lanes<Float32, kCount>(address, at, lanes);
  }
};

struct BFloat16States {
  template <int kCount>
  __device__ static Lanes<kCount> load(u64 address, u64 at) {
    return load_lanes<BFloat16, kCount>(address, at);
  }
  template <int kCount>
  __device__ static void store(u64 address, u64 at, const Lanes<kCount>& lanes, u32 state, u32 seed) {
    if (state == 0) return store_lanes<BFloat16, kCount>(address, at, lanes);
    Packet<Bits16, kCount> packet;
    const Draws draws(u32(at / kCodeBlock), seed, state);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32 drawn = draws.high(u32(at % kCodeBlock) + i) << 8 | draws.low;
      const u32 bits = __float_as_uint(lanes.lane[i]) + drawn;  // of a GPU's NaN those of -0
      packet.element[i].bits = lanes.lane[i] != lanes.lane[i] ? 0x7fc0 : u16(bits >> 16);
    }
    store_packet(reinterpret_cast<Packet<Bits16, kCount>*>(address + 2 * at), packet);
  }
};

// Apply `rule(param, grad, states)` to an element of a group.
template <u32 kStates, int kCount, typename Rule>
__device__ inline void step_lane(
    Lanes<kCount>& param, const Lanes<kCount>& grad, Lanes<kCount>* states, int i, const Rule& rule) {
  float values[kStates + 1];
#pragma unroll
  for (u32 k = 0; k < kStates; ++k) values[k] = states[k].lane[i];
  param.lane[i] = rule(param.lane[i], grad.lane[i], values);
#pragma unroll
  for (u32 k = 0; k < kStates; ++k) states[k].lane[i] = values[k];
}

// Apply it to groups of kCount elements of [begin, end), with divided gradients.
template <int kCount, typename States, u32 kStates, typename Rule>
__device__ void step_range(
    const Parameter& parameter, u64 begin, u64 end, const Divisor& divisor, const Rule& rule, u32 seed) {
  for (u64 at = begin + u64(threadIdx.x) * kCount; at + kCount <= end; at += u64(kThreads) * kCount) {
    Lanes<kCount> grad = load_grad<kCount>(parameter, at);
    Lanes<kCount> param = load_param<kCount>(parameter, at);
    Lanes<kCount> states[kStates + 1];
#pragma unroll
    for (u32 k = 0; k < kStates; ++k) states[k] = States::template load<kCount>(parameter.states[k], at);
    divide_grad<kCount>(parameter, at, divisor, grad);
#pragma unroll
    for (int i = 0; i < kCount; ++i) step_lane<kStates>(param, grad, states, i, rule);
#pragma unroll
    for (u32 k = 0; k < kStates; ++k)
      States::template store<kCount>(parameter.states[k], at, states[k], k, seed);
    store_param<kCount>(parameter, at, param);
  }
}

constexpr int kGroup = 4;  // elements that are moved at once

// The elements of a run of granules; groups of kGroup end at `groups_end`.
struct ElementRange {
  u64 begin, groups_end, end;

  __device__ ElementRange(u64 numel, u32 begin_granule, u32 end_granule) {
    const u64 stop = u64(end_granule) * kGranuleElements;
    begin = u64(begin_granule) * kGranuleElements;
    end = stop < numel ? stop : numel;
    groups_end = end - (end - begin) % kGroup;
  }
  // Where tensors are not aligned, elements are moved one by one.
  __device__ void only_if(bool aligned) {
    if (!aligned) groups_end = begin;
  }
};

// The codes of kGroup neighbours of one state, of which a warp has a block: csrc/step_states.h, to the bit.
struct CodedLanes {
  u64 block, codes;  // addresses
  u32 state;
  float unit;

  CodedLanes() = default;
  __device__ CodedLanes(u64 address, u64 at, u32 state) : state(state) {
    block = address + at / kCodeBlock * kCodeBlockBytes;
    codes = block + at % kCodeBlock;
    unit = load_packet(reinterpret_cast<const Packet<Float32, 1>*>(block + kCodeBlock)).element[0].value;
  }

  __device__ Lanes<kGroup> load() const {
    const auto packet = load_packet(reinterpret_cast<const Packet<u8, kGroup>*>(codes));
    Lanes<kGroup> lanes;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float code = state == 0 ? float((signed char)packet.element[i]) : float(packet.element[i]);
      const float root = code * unit;
      lanes.lane[i] = state == 0 ? code * fabsf(code) * unit : root * root;
    }
    return lanes;
  }

  // All lanes of a warp call it.
  __device__ void store(Lanes<kGroup> lanes, u64 at, u32 seed) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (state != 0) lanes.lane[i] = at_most(sqrtf(lanes.lane[i]), kMostRoot);
      largest = join_max(largest, fabsf(lanes.lane[i]));
    }
    for (u32 distance = 16; distance > 0; distance /= 2)
      largest = join_max(largest, __shfl_xor_sync(kFullWarp, largest, distance));
    largest = at_most(largest, kMostSigned);
    const float now = largest * (state == 0 ? float(1.0 / (127 * 127)) : float(1.0 / 255));
    const float inverse = now > kLeastUnit ? 1 / now : 0;
    Packet<u8, kGroup> packet;
    const Draws draws(u32(at / kCodeBlock), seed, state);
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      packet.element[i] = state == 0 ? signed_code(lanes.lane[i], inverse)
                                     : square_code(lanes.lane[i], inverse, draws, u32(at % kCodeBlock) + i);
    store_packet(reinterpret_cast<Packet<u8, kGroup>*>(codes), packet);
    if (at % kCodeBlock == 0)
      store_packet(reinterpret_cast<Packet<Float32, 1>*>(block + kCodeBlock), Packet<Float32, 1>{{{now}}});
  }

 private:
  static constexpr float kLeastUnit = 0x1p-120f, kMostSigned = 0x1p127f, kMostRoot = 0x1p63f;

  __device__ static float at_most(float value, float most) { return value > most ? most : value; }  // or NaN
  __device__ static u8 signed_code(float value, float inverse) {
    const float root = at_most(sqrtf(fabsf(value) * inverse) + 0.5f, 127.0f);
    return root != root ? 0x80 : u8(int(value < 0 ? -root : root));
  }
  __device__ static u8 square_code(float root, float inverse, const Draws& draws, u32 place) {
    const float code = fmaf(root, inverse, draws.low * 0x1p-16f) + draws.high(place) * 0x1p-8f;
    const u32 least = root != 0;
    return u8(code >= 1 ? fminf(code, 255.0f) : least);
  }
};

// As step_range, of states in codes: a warp takes a block of them, a lane kGroup neighbours.
template <u32 kStates, typename Rule>
__device__ void step_codes(
    const Parameter& parameter, const ElementRange& range, bool aligned, const Divisor& divisor,
    const Rule& rule, u32 seed) {
  constexpr u32 kWarp = 32;
  static_assert(kCodeBlock == kWarp * kGroup && kGranuleElements % kCodeBlock == 0);
  const u64 first = range.begin + u64(threadIdx.x / kWarp) * kCodeBlock;
  for (u64 block = first; block < range.end; block += kThreads / kWarp * kCodeBlock) {
    const u64 at = block + threadIdx.x % kWarp * kGroup;
    const bool whole = aligned && at + kGroup <= range.end;
    Lanes<kGroup> grad{}, param{}, states[kStates + 1];
    CodedLanes coded[kStates + 1];
#pragma unroll
    for (u32 k = 0; k < kStates; ++k) {
      coded[k] = CodedLanes(parameter.states[k], at, k);
      states[k] = coded[k].load();
    }
    if (whole) {
      grad = load_grad<kGroup>(parameter, at);
      param = load_param<kGroup>(parameter, at);
      divide_grad<kGroup>(parameter, at, divisor, grad);
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (at + i >= range.end) continue;  // what is kept there is 0, and stays
      if (!whole) {
        Lanes<1> one = load_grad<1>(parameter, at + i);
        divide_grad<1>(parameter, at + i, divisor, one);
        grad.lane[i] = one.lane[0];
        param.lane[i] = load_param<1>(parameter, at + i).lane[0];
      }
      step_lane<kStates>(param, grad, states, i, rule);
      if (!whole) store_param<1>(parameter, at + i, Lanes<1>{{param.lane[i]}});
    }
    if (whole) store_param<kGroup>(parameter, at, param);
#pragma unroll
    for (u32 k = 0; k < kStates; ++k) coded[k].store(states[k], at, seed);
  }
}

template <typename States, u32 kStates, typename Rule>
__device__ void step_groups(
    const Parameter& parameter, const ElementRange& range, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  step_range<kGroup, States, kStates>(parameter, range.begin, range.groups_end, divisor, rule, seed);
  step_range<1, States, kStates>(parameter, range.groups_end, range.end, divisor, rule, seed);
}

// The same for a run of granules of kGranuleElements; `seed`: of what is rounded at random.
template <u32 kStates, typename Rule>
__device__ void step_piece(
    const Parameter& parameter, u32 begin_granule, u32 end_granule, const Divisor& divisor, const Rule& rule,
    u32 seed) {
  ElementRange range(parameter.numel, begin_granule, end_granule);
  const bool aligned = parameter.is_aligned(range.begin, kGroup);
  range.only_if(aligned);
  if constexpr (kStates > 0) {  // the same branch for all threads of a block
    if (parameter.state_type == kStateCodes)
      return step_codes<kStates>(parameter, range, aligned, divisor, rule, seed);
    if (parameter.state_type == kStateBFloat16)
      return step_groups<BFloat16States, kStates>(parameter, range, divisor, rule, seed);
  }
  step_groups<Float32States, kStates>(parameter, range, divisor, rule, seed);
}

template <int kCount>
__device__ void divide_range(const Parameter& parameter, u64 begin, u64 end, const Divisor& divisor) {
  for (u64 at = begin + u64(threadIdx.x) * kCount; at + kCount <= end; at += u64(kThreads) * kCount) {
    Lanes<kCount> grad = load_grad<kCount>(parameter, at);
    divide_grad<kCount>(parameter, at, divisor, grad);
  }
}

// A step that is skipped: gradients are divided, and nothing else is written.
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

// Call `visit(master, high, low, at, group)` for groups of `group`'s kCount elements of stored weights, whose
// rows are: master, high half; `table.count` behind it, low half.
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
