// Parameters and gradients as blocks of float32 lanes, whatever they are stored as.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "step_rows.h"
#include "weight_pair.h"

namespace amp_plugin {

using Floats = at::vec::Vectorized<float>;

// Two vectors of float32: as many elements as one vector of a 16-bit type holds.
struct Block {
  static constexpr int64_t kHalf = Floats::size();
  static constexpr int64_t kSize = 2 * kHalf;
  Floats low;
  Floats high;
};

// Ask for what a later block of the same tensor reads: the processor's own look-ahead follows four to seven
// streams less well (15 to 20 % of a step).
template <typename T>
[[gnu::always_inline]] inline void fetch_ahead(const T* data) {
  constexpr int64_t kAhead = 512;  // elements
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < Block::kSize; i += kLine) __builtin_prefetch(data + kAhead + i);
}

template <typename T>
[[gnu::always_inline]] inline Block load_block(const T* data) {
  fetch_ahead(data);
  if constexpr (std::is_same_v<T, float>) {
    return {Floats::loadu(data), Floats::loadu(data + Block::kHalf)};
  } else {
    auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(data));
    return {low, high};
  }
}

template <typename T>
[[gnu::always_inline]] inline void store_block(T* data, const Block& block) {
  if constexpr (std::is_same_v<T, float>) {
    block.low.store(data);
    block.high.store(data + Block::kHalf);
  } else {
    at::vec::convert_from_float<T>(block.low, block.high).store(data);
  }
}

// Division by a number that is the same for all: as quick as multiplications, and rounded as a division
// (Markstein, 1990), but for results below float32's normal range.
class Divisor {
 public:
  explicit Divisor(double divisor) : divisor_(static_cast<float>(divisor)), inverse_(1 / divisor_) {}

  bool is_one() const { return divisor_ == 1; }

  [[gnu::always_inline]] Floats divide(Floats x) const {
    const Floats quotient = x * Floats(inverse_);
    const Floats rest = at::vec::fmadd(quotient, Floats(-divisor_), x);
    const Floats corrected = at::vec::fmadd(rest, Floats(inverse_), quotient);
    // Without a rest the quotient is exact, down to the sign of a zero; of an infinity there is none.
#if defined(CPU_CAPABILITY_AVX512)
    constexpr int kZeroInfinityOrNan = 0x9F;
    return _mm512_mask_mov_ps(corrected, _mm512_fpclass_ps_mask(rest, kZeroInfinityOrNan), quotient);
#else
    const Floats zero_or_nan = rest - rest;
    return Floats::blendv(quotient, corrected, (zero_or_nan == Floats(0)) & (rest != Floats(0)));
#endif
  }

 private:
  float divisor_;
  float inverse_;
};

// A choice between two numbers that is the same for all, made of both. With branches the loop's instructions
// follow each other in pieces that the compiler does not order: a step of a pair then takes 1.4 of this.
class Choice {
 public:
  explicit Choice(bool first) : mask_(std::bit_cast<float>(first ? 0xFFFFFFFFU : 0U)) {}

  [[gnu::always_inline]] Floats of(const Floats& first, const Floats& second) const {
    return Floats::blendv(second, first, Floats(mask_));
  }

 private:
  float mask_;
};

// A float32 parameter.
struct Fp32Weight {
  [[gnu::always_inline]] static Block load(const Row& row, int64_t at) {
    return load_block(static_cast<const float*>(row.param) + at);
  }
  [[gnu::always_inline]] static void store(const Row& row, int64_t at, const Block& block) {
    store_block(static_cast<float*>(row.param) + at, block);
  }
};

// As many elements as Floats holds, as bits.
using Words = uint32_t [[gnu::vector_size(sizeof(Floats))]];

// The signed 16-bit numbers at `data`, each in 32 bits.
[[gnu::always_inline]] inline Words widened(const int16_t* data) {
#if defined(CPU_CAPABILITY_AVX512)  // of the general form GCC makes halves
  const __m256i shorts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  return reinterpret_cast<Words>(_mm512_cvtepi16_epi32(shorts));
#else
  using Shorts = int16_t [[gnu::vector_size(sizeof(Floats) / 2)]];
  using Ints = int32_t [[gnu::vector_size(sizeof(Floats))]];
  Shorts shorts;
  std::memcpy(&shorts, data, sizeof(shorts));
  return reinterpret_cast<Words>(__builtin_convertvector(shorts, Ints));
#endif
}

// Of two vectors of 32 bits, the high halves to one place and the low ones, their highest bit turned, to
// another.
[[gnu::always_inline]] inline void store_halves(const Words (&words)[2], uint16_t* high, uint16_t* low) {
#if defined(CPU_CAPABILITY_AVX512)  // of the general form GCC makes twice as many instructions
  const __m512i low_first =
      _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0));
  const __m512i first = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(words[0]), low_first);
  const __m512i second = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(words[1]), low_first);
  const __m512i even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i lows = _mm512_permutex2var_epi64(first, even, second);
  _mm512_storeu_si512(low, _mm512_xor_si512(lows, _mm512_set1_epi16(INT16_MIN)));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi64(first, odd, second));
#else
  using Shorts = uint16_t [[gnu::vector_size(sizeof(Floats) / 2)]];
  for (int i = 0; i < 2; ++i) {
    const auto highs = __builtin_convertvector(words[i] >> 16, Shorts);
    const auto lows = __builtin_convertvector(words[i] ^ 0x8000U, Shorts);
    std::memcpy(high + i * Block::kHalf, &highs, sizeof(highs));
    std::memcpy(low + i * Block::kHalf, &lows, sizeof(lows));
  }
#endif
}

// A bfloat16 parameter with the 16 bits that make it a float32.
//
// Whole vectors in registers: through arrays in memory the compiler writes halves of a vector and reads the
// whole, for which the processor waits until they are written (1.2 to 1.4 of the step of a float32).
struct PairedWeight {
  [[gnu::always_inline]] static Block load(const Row& row, int64_t at) {
    const auto* high = static_cast<const int16_t*>(row.param) + at;
    const auto* low = static_cast<const int16_t*>(row.remainder) + at;
    fetch_ahead(high);
    fetch_ahead(low);
    return {joined(high, low), joined(high + Block::kHalf, low + Block::kHalf)};
  }

  // pack_weight of each. What is missing from the high half is the low 16 bits as they are; rounding turns
  // the highest of them.
  [[gnu::always_inline]] static void store(const Row& row, int64_t at, const Block& block) {
    auto* high = static_cast<uint16_t*>(row.param) + at;
    auto* low = static_cast<uint16_t*>(row.remainder) + at;
    const bool not_finite = (block.low + block.high).has_inf_nan();
    if (__builtin_expect(not_finite, false)) return store_each(block.low, block.high, high, low);
    Words rounded[2];
    block.low.store(&rounded[0]);
    block.high.store(&rounded[1]);
    for (Words& words : rounded) words += 0x8000U;
    store_halves(rounded, high, low);
  }

 private:
  // unpack_weight of each; the shifts drop what widening put before a high half, and its sign.
  [[gnu::always_inline]] static Floats joined(const int16_t* high, const int16_t* low) {
    const Words highs = widened(high) << 16;
    const Words bits = highs + (widened(low) & ((highs << 1) != 0));
    return Floats::loadu(&bits);
  }

  [[gnu::noinline, gnu::cold]] static void store_each(
      Floats first, Floats second, uint16_t* high, uint16_t* low) {
    alignas(64) uint32_t bits[Block::kSize];
    first.store(bits);
    second.store(bits + Block::kHalf);
    for (int64_t i = 0; i < Block::kSize; ++i) {
      const WeightPair pair = pack_weight(bits[i]);
      high[i] = pair.high;
      low[i] = static_cast<uint16_t>(pair.low);
    }
  }
};

}  // namespace amp_plugin
