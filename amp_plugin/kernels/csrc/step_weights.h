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
  explicit Divisor(double divisor)
      : divisor_(static_cast<float>(divisor)), inverse_(1 / divisor_), is_one_(divisor_ == 1) {}

  [[gnu::always_inline]] Floats divide(Floats x) const {
    if (is_one_) return x;
    const Floats quotient = x * Floats(inverse_);
    const Floats rest = at::vec::fmadd(quotient, Floats(-divisor_), x);
    const Floats corrected = at::vec::fmadd(rest, Floats(inverse_), quotient);
    return Floats::blendv(quotient, corrected, rest == rest);  // of an infinity there is no rest
  }

 private:
  float divisor_;
  float inverse_;
  bool is_one_;
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

// A float32 parameter, and the copy of it that the model computes with.
template <typename Copy>
struct CopiedWeight : Fp32Weight {
  [[gnu::always_inline]] static void store(const Row& row, int64_t at, const Block& block) {
    Fp32Weight::store(row, at, block);
    store_block(static_cast<Copy*>(row.beside) + at, block);
  }
};

// As many elements as Floats holds, as bits.
using Words = uint32_t [[gnu::vector_size(sizeof(Floats))]];

// The numbers at `data`, each in 32 bits, with their sign if they have one.
template <typename Short>
[[gnu::always_inline]] inline Words widened(const Short* data) {
#if defined(CPU_CAPABILITY_AVX512)  // of the general form GCC makes halves
  const __m256i shorts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  const bool has_sign = std::is_signed_v<Short>;
  return reinterpret_cast<Words>(has_sign ? _mm512_cvtepi16_epi32(shorts) : _mm512_cvtepu16_epi32(shorts));
#else
  using Shorts = Short [[gnu::vector_size(sizeof(Floats) / 2)]];
  using Same =
      std::conditional_t<std::is_signed_v<Short>, int32_t, uint32_t> [[gnu::vector_size(sizeof(Floats))]];
  Shorts shorts;
  std::memcpy(&shorts, data, sizeof(shorts));
  return reinterpret_cast<Words>(__builtin_convertvector(shorts, Same));
#endif
}

// The low 16 bits of each.
[[gnu::always_inline]] inline void store_low_halves(const Words& words, void* data) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm256_storeu_si256(static_cast<__m256i*>(data), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words)));
#else
  using Shorts = uint16_t [[gnu::vector_size(sizeof(Floats) / 2)]];
  const auto shorts = __builtin_convertvector(words, Shorts);
  std::memcpy(data, &shorts, sizeof(shorts));
#endif
}

// A bfloat16 parameter with the 16 bits that make it a float32.
//
// Whole vectors in registers: through arrays in memory the compiler writes halves of a vector and reads the
// whole, for which the processor waits until they are written (1.2 to 1.4 of the step of a float32).
struct PairedWeight {
  [[gnu::always_inline]] static Block load(const Row& row, int64_t at) {
    const auto* high = static_cast<const uint16_t*>(row.param) + at;
    const auto* low = static_cast<const int16_t*>(row.beside) + at;
    fetch_ahead(high);
    fetch_ahead(low);
    return {joined(high, low), joined(high + Block::kHalf, low + Block::kHalf)};
  }

  [[gnu::always_inline]] static void store(const Row& row, int64_t at, const Block& block) {
    auto* high = static_cast<uint16_t*>(row.param) + at;
    auto* low = static_cast<int16_t*>(row.beside) + at;
    if (block.low.has_inf_nan() || block.high.has_inf_nan()) return split_each(block, high, low);
    split(block.low, high, low);
    split(block.high, high + Block::kHalf, low + Block::kHalf);
  }

 private:
  // unpack_weight of each.
  [[gnu::always_inline]] static Floats joined(const uint16_t* high, const int16_t* low) {
    const Words bits = (widened(high) << 16) + widened(low);
    return Floats::loadu(&bits);
  }

  // pack_weight of each; all are finite. What is missing from the high half is the low 16 bits as they are.
  [[gnu::always_inline]] static void split(const Floats& values, uint16_t* high, int16_t* low) {
    Words bits;
    values.store(&bits);
    store_low_halves((bits + 0x8000U) >> 16, high);
    store_low_halves(bits, low);
  }

  [[gnu::noinline]] static void split_each(const Block& block, uint16_t* high, int16_t* low) {
    alignas(64) uint32_t bits[Block::kSize];
    block.low.store(bits);
    block.high.store(bits + Block::kHalf);
    for (int64_t i = 0; i < Block::kSize; ++i) {
      const WeightPair pair = pack_weight(bits[i]);
      high[i] = pair.high;
      low[i] = pair.low;
    }
  }
};

}  // namespace amp_plugin
