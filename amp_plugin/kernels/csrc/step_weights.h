// Loads parameters and gradients as blocks of float32 lanes, and stores them, in each storage format.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_layout.h"
#include "step_arithmetic.h"
#include "step_rows.h"

namespace amp_plugin {

// Two vectors of float32. They have as many elements as one vector of a 16-bit type.
struct Block {
  static constexpr int64_t kHalf = Floats::size();
  static constexpr int64_t kSize = 2 * kHalf;
  Floats low;
  Floats high;
};

// Prefetches the data of a later block of the same tensor. The hardware prefetcher alone is slower, as it has
// to follow four to seven streams (15 to 20 % of a step).
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

// A float32 parameter.
struct Fp32Weight {
  [[gnu::always_inline]] static Block load(const Row& row, int64_t at) {
    return load_block(static_cast<const float*>(row.param) + at);
  }
  [[gnu::always_inline]] static void store(const Row& row, int64_t at, const Block& block) {
    store_block(static_cast<float*>(row.param) + at, block);
  }
};

// 16-bit integers, as many as a Block has elements.
using Shorts = uint16_t [[gnu::vector_size(sizeof(Floats))]];

#if defined(CPU_CAPABILITY_AVX2)
// Swaps the two middle quarters of a vector. AVX2 instructions work on each half separately, and this
// restores the order.
[[gnu::always_inline]] inline __m256i in_order(__m256i parts) {
  return _mm256_permute4x64_epi64(parts, 0b11011000);
}
#endif

// Splits 32-bit words into high and low halves. The compiler generates twice as many instructions from the
// generic form.
struct Halves {
  Shorts high, low;

  [[gnu::always_inline]] explicit Halves(const Words (&words)[2]) {
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0));
    const __m512i first = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(words[0]), order);
    const __m512i second = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(words[1]), order);
    const __m512i even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
    low = reinterpret_cast<Shorts>(_mm512_permutex2var_epi64(first, even, second));
    high = reinterpret_cast<Shorts>(_mm512_permutex2var_epi64(first, odd, second));
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0));
    const __m256i first = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(words[0]), order);
    const __m256i second = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(words[1]), order);
    low = reinterpret_cast<Shorts>(in_order(_mm256_unpacklo_epi64(first, second)));
    high = reinterpret_cast<Shorts>(in_order(_mm256_unpackhi_epi64(first, second)));
#else
    for (int64_t i = 0; i < Block::kSize; ++i) {
      const uint32_t word = words[i / Block::kHalf][i % Block::kHalf];
      high[i] = static_cast<uint16_t>(word >> 16);
      low[i] = static_cast<uint16_t>(word);
    }
#endif
  }
};

// A bfloat16 parameter with its remainder.
//
// The halves stay in registers. With arrays in memory instead, the compiler writes half vectors and reads
// whole ones, and the processor waits until the writes have finished (1.2 to 1.4 times the step of a
// float32).
struct PairedWeight {
  // Does unpack_weight() for each element. The low half is signed. To make it unsigned, 0x8000 is added,
  // which flips its highest bit. After the halves are joined, 0x8000 is subtracted again.
  [[gnu::always_inline]] static Block load(const Row& row, int64_t at) {
    const auto* high = static_cast<const uint16_t*>(row.param) + at;
    const auto* low = static_cast<const uint16_t*>(row.remainder) + at;
    fetch_ahead(high);
    fetch_ahead(low);
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i highs = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(high));
    const __m512i lows = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(low));
    const __m512i turn = _mm512_set1_epi16(INT16_MIN), excess = _mm512_set1_epi32(0x8000);
    const __mmask32 counts = _mm512_test_epi16_mask(highs, _mm512_set1_epi16(0x7FFF));
    const __m512i turned = _mm512_mask_add_epi16(turn, counts, lows, turn);
    return {
        _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_unpacklo_epi16(turned, highs), excess)),
        _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_unpackhi_epi16(turned, highs), excess))};
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i highs = in_order(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    const __m256i lows = in_order(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __m256i excess = _mm256_set1_epi32(0x8000), zero = _mm256_setzero_si256();
    const __m256i no_count = _mm256_cmpeq_epi16(_mm256_add_epi16(highs, highs), zero);
    const __m256i turned =
        _mm256_xor_si256(_mm256_andnot_si256(no_count, lows), _mm256_set1_epi16(INT16_MIN));
    return {
        _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_unpacklo_epi16(turned, highs), excess)),
        _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_unpackhi_epi16(turned, highs), excess))};
#else
    alignas(64) uint32_t bits[Block::kSize];
    for (int64_t i = 0; i < Block::kSize; ++i) bits[i] = cuda::unpack_weight(high[i], low[i]);
    return {Floats::loadu(bits), Floats::loadu(bits + Block::kHalf)};
#endif
  }

  // Does pack_weight() for each element. Adding 0x8000 rounds the high half and flips the highest bit of the
  // low half. Flipping that bit back gives the remainder.
  [[gnu::always_inline]] static void store(const Row& row, int64_t at, const Block& block) {
    auto* high = static_cast<uint16_t*>(row.param) + at;
    auto* low = static_cast<uint16_t*>(row.remainder) + at;
    const bool not_finite = (block.low + block.high).has_inf_nan();
    if (__builtin_expect(not_finite, false)) return store_each(block.low, block.high, high, low);
    Halves halves({bits_of(block.low) + 0x8000U, bits_of(block.high) + 0x8000U});
    halves.low ^= 0x8000;
    std::memcpy(low, &halves.low, sizeof(halves.low));
    std::memcpy(high, &halves.high, sizeof(halves.high));
  }

 private:
  [[gnu::noinline, gnu::cold]] static void store_each(
      Floats first, Floats second, uint16_t* high, uint16_t* low) {
    alignas(64) uint32_t bits[Block::kSize];
    first.store(bits);
    second.store(bits + Block::kHalf);
    for (int64_t i = 0; i < Block::kSize; ++i) {
      const uint32_t halves = cuda::pack_weight(bits[i]);
      high[i] = static_cast<uint16_t>(halves >> 16);
      low[i] = static_cast<uint16_t>(halves);
    }
  }
};

}  // namespace amp_plugin
