// An optimizer's states as blocks of float32 lanes, whatever they are stored as; docs/design.md says why so.
//
//   float32    as they are
//   bfloat16   the first state rounded to nearest, second moments up or down at random
//   codes      blocks of kCodeBlock bytes and a float32, the block's unit:
//              first state       code * |code| * unit, code of -127..127, rounded to nearest
//              second moments    (code * unit)^2, code of 0..255, rounded up or down at random; 0 only of 0
//
// A second moment moves by 1/1000 of itself, less than half of what 8 bits tell apart: rounded to nearest it
// would stand still. What is drawn for an element follows from its place and the number of the step.
#pragma once

#include <array>
#include <cmath>

#include "step_rows.h"
#include "step_weights.h"

namespace amp_plugin {

// As many elements as Floats holds, as bits.
using Words = uint32_t [[gnu::vector_size(sizeof(Floats))]];

// The numbers 0, 1, 2 ... below the size of a vector.
[[gnu::always_inline]] inline Words counted() {
  Words words;
  Floats::arange(0.0F, 1.0F).store(&words);
  using Lanes = float [[gnu::vector_size(sizeof(Floats))]];
  return __builtin_convertvector(reinterpret_cast<Lanes>(words), Words);
}

// 16 random bits for each of the elements from `index` on: the upper half for exp_avg_sq, the lower for its
// maximum. Of a block of elements only the start is random; from there they are spread evenly.
class Draws {
 public:
  Draws() = default;
  [[gnu::always_inline]] Draws(int64_t index, uint32_t seed)
      : start_(
            start_of(static_cast<uint32_t>(static_cast<uint64_t>(index) / kCodeBlock), seed) +
            static_cast<uint32_t>(static_cast<uint64_t>(index) % kCodeBlock) * kStride) {}

  [[gnu::always_inline]] Words of(size_t state, int64_t place) const {
    const Words bits = counted() * kStride + (start_ + static_cast<uint32_t>(place) * kStride);
    return state == 1 ? bits >> 16 : bits & 0xFFFFU;
  }

 private:
  static constexpr uint32_t kStride = 0x9E3779B1U;

  [[gnu::always_inline]] static uint32_t start_of(uint32_t block, uint32_t seed) {
    uint32_t bits = block * kStride + seed;
    bits = (bits ^ (bits >> 15)) * 0x2C1B3C6DU;
    bits = (bits ^ (bits >> 12)) * 0x297A2D39U;
    return bits ^ (bits >> 15);
  }

  uint32_t start_ = 0;
};

inline uint32_t seed_of(double step) {
  return static_cast<uint32_t>(static_cast<uint64_t>(step)) * 0x85EBCA77U;
}

[[gnu::always_inline]] inline Words bits_of(const Floats& floats) {
  Words words;
  floats.store(&words);
  return words;
}

using SignedWords = int32_t [[gnu::vector_size(sizeof(Floats))]];

[[gnu::always_inline]] inline Floats floats_of(const SignedWords& numbers) {
  using Lanes = float [[gnu::vector_size(sizeof(Floats))]];
  const Lanes lanes = __builtin_convertvector(numbers, Lanes);
  return Floats::loadu(&lanes);
}

[[gnu::always_inline]] inline SignedWords truncated(const Floats& floats) {
  using Lanes = float [[gnu::vector_size(sizeof(Floats))]];
  return __builtin_convertvector(reinterpret_cast<Lanes>(bits_of(floats)), SignedWords);
}

// The lowest bytes of 32-bit numbers, from and to memory.
template <typename Byte>
[[gnu::always_inline]] inline Floats load_bytes(const Byte* data) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  return _mm512_cvtepi32_ps(
      std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
  return _mm256_cvtepi32_ps(
      std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  int32_t numbers[Block::kHalf];
  for (int64_t i = 0; i < Block::kHalf; ++i) numbers[i] = data[i];
  SignedWords words;
  std::memcpy(&words, numbers, sizeof(words));
  return floats_of(words);
#endif
}

template <typename Narrow>
[[gnu::always_inline]] inline void store_lowest(const SignedWords& words, Narrow* data) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto wide = reinterpret_cast<__m512i>(words);
  if constexpr (sizeof(Narrow) == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), _mm512_cvtepi32_epi8(wide));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm512_cvtepi32_epi16(wide));
  }
#else
  if constexpr (sizeof(Narrow) == 1) {
    using Bytes = int8_t [[gnu::vector_size(sizeof(Floats) / 4)]];
    const auto bytes = __builtin_convertvector(words, Bytes);
    std::memcpy(data, &bytes, sizeof(bytes));
  } else {
    using Shorts = int16_t [[gnu::vector_size(sizeof(Floats) / 2)]];
    const auto shorts = __builtin_convertvector(words, Shorts);
    std::memcpy(data, &shorts, sizeof(shorts));
  }
#endif
}

// The states of a row. A unit of kUnit elements begins at `at`; then each of its blocks, at a `place` in it,
// is loaded and stored; then it ends. flush() comes behind the last unit.
template <size_t kStates>
class Fp32States {
 public:
  static constexpr int64_t kUnit = Block::kSize;

  [[gnu::always_inline]] Fp32States(const Row& row, uint32_t) : row_(row) {}
  [[gnu::always_inline]] void begin(int64_t at) { at_ = at; }
  [[gnu::always_inline]] Block load(size_t i, int64_t) const { return load_block(data(i)); }
  [[gnu::always_inline]] void store(size_t i, int64_t, const Block& block) { store_block(data(i), block); }
  [[gnu::always_inline]] void end() const {}
  [[gnu::always_inline]] void flush() const {}

 private:
  [[gnu::always_inline]] float* data(size_t i) const { return static_cast<float*>(row_.states[i]) + at_; }

  const Row& row_;
  int64_t at_ = 0;
};

template <size_t kStates>
class Bf16States {
 public:
  static constexpr int64_t kUnit = Block::kSize;

  [[gnu::always_inline]] Bf16States(const Row& row, uint32_t seed) : row_(row), seed_(seed) {}
  [[gnu::always_inline]] void begin(int64_t at) {
    at_ = at;
    draws_ = Draws(row_.offset + at, seed_);
  }
  [[gnu::always_inline]] Block load(size_t i, int64_t) const { return load_block(data(i)); }
  [[gnu::always_inline]] void store(size_t i, int64_t, const Block& block) {
    if (i == 0) return store_block(data(i), block);
    round_at_random(i, block.low, 0);
    round_at_random(i, block.high, Block::kHalf);
  }
  [[gnu::always_inline]] void end() const {}
  [[gnu::always_inline]] void flush() const {}

 private:
  [[gnu::always_inline]] at::BFloat16* data(size_t i) const {
    return static_cast<at::BFloat16*>(row_.states[i]) + at_;
  }
  [[gnu::always_inline]] void round_at_random(size_t i, const Floats& values, int64_t from) {
    const Words bits = (bits_of(values) + draws_.of(i, from)) >> 16;
    store_lowest(reinterpret_cast<SignedWords>(bits), reinterpret_cast<uint16_t*>(data(i) + from));
  }

  const Row& row_;
  int64_t at_ = 0;
  uint32_t seed_;
  Draws draws_;
};

// A unit is encoded while the next one is computed: else the processor would wait for its largest element
// (a fifth of a step).
template <size_t kStates>
class CodedStates {
 public:
  static constexpr int64_t kUnit = kCodeBlock;

  [[gnu::always_inline]] CodedStates(const Row& row, uint32_t seed) : row_(row), seed_(seed) {
    for (size_t i = 0; i < kStates; ++i) codes_[i] = nothing_;
  }

  [[gnu::always_inline]] void begin(int64_t at) {
    last_draws_ = draws_;
    draws_ = Draws(row_.offset + at, seed_);
    for (size_t i = 0; i < kStates; ++i) {
      last_[i] = codes_[i];
      codes_[i] = static_cast<uint8_t*>(row_.states[i]) + at / kCodeBlock * kCodeBlockBytes;
      float unit;
      std::memcpy(&unit, codes_[i] + kCodeBlock, sizeof(float));
      units_[i] = Floats(unit);
      largest_[i] = Floats(0);
      for (int64_t ahead = 0; ahead < kCodeBlockBytes; ahead += 64)
        __builtin_prefetch(codes_[i] + 4 * kCodeBlockBytes + ahead);
    }
  }

  [[gnu::always_inline]] Block load(size_t i, int64_t place) const {
    return {decoded(i, place), decoded(i, place + Block::kHalf)};
  }

  [[gnu::always_inline]] void store(size_t i, int64_t place, const Block& block) {
    encode(i, place);
    encode(i, place + Block::kHalf);
    keep(i, place, block.low);
    keep(i, place + Block::kHalf, block.high);
  }

  [[gnu::always_inline]] void end() {
    for (size_t i = 0; i < kStates; ++i) {
      const float unit = largest(largest_[i]) * (i == 0 ? kSignedUnit : kUnsignedUnit);
      const float inverse = unit > kLeastUnit ? 1 / unit : 0;
      inverses_[i] = Floats(i == 0 ? inverse : inverse * kFixed);
      std::memcpy(codes_[i] + kCodeBlock, &unit, sizeof(float));
    }
  }

  [[gnu::always_inline]] void flush() {
    last_draws_ = draws_;
    for (size_t i = 0; i < kStates; ++i) {
      last_[i] = codes_[i];
      for (int64_t place = 0; place < kCodeBlock; place += Block::kHalf) encode(i, place);
    }
  }

 private:
  static constexpr float kMostSigned = 127;
  static constexpr float kSignedUnit = static_cast<float>(1.0 / (127 * 127));
  static constexpr float kUnsignedUnit = static_cast<float>(1.0 / 255);
  static constexpr float kLeastUnit = 0x1p-120F;  // below, all are 0: its inverse might be infinite
  static constexpr float kMostRoot = 0x1p63F;  // of a second moment: an infinite unit times 0 would be nan
  // 16 bits behind the point; less than 2^16, so that the largest code and what is drawn stay below 256.
  static constexpr float kFixed = 0x1p16F * (1 - 0x1p-21F);

  [[gnu::always_inline]] Floats decoded(size_t i, int64_t place) const {
    if (i == 0) {
      const Floats code = load_bytes(reinterpret_cast<const int8_t*>(codes_[i]) + place);
      return code * code.abs() * units_[i];
    }
    const Floats root = load_bytes(codes_[i] + place) * units_[i];
    return root * root;
  }

  // Until the unit's largest is known: the first state, or the root of a second moment.
  [[gnu::always_inline]] void keep(size_t i, int64_t place, const Floats& value) {
    const Floats kept = i == 0 ? value : at::vec::clamp_max(value.sqrt(), Floats(kMostRoot));
    kept.store(&kept_[i][place]);
    largest_[i] = at::vec::clamp_min(i == 0 ? kept.abs() : kept, largest_[i]);
  }

  [[gnu::always_inline]] static float largest(const Floats& lanes) {
    return at::vec::vec_reduce_all<float>(
        [](Floats& a, Floats& b) { return at::vec::clamp_min(a, b); }, lanes);
  }

  // What keep() has left there.
  [[gnu::always_inline]] void encode(size_t i, int64_t place) {
    const Floats kept = Floats::loadu(&kept_[i][place]);
    if (i == 0) {
      const Floats root = (kept.abs() * inverses_[i]).sqrt() + Floats(0.5F);
      const Floats code = at::vec::clamp_max(root, Floats(kMostSigned)) ^ (kept & Floats(-0.0F));
      return store_lowest(truncated(code), reinterpret_cast<int8_t*>(last_[i]) + place);
    }
    const Words fixed = reinterpret_cast<Words>(truncated(kept * inverses_[i])) + last_draws_.of(i, place);
    const SignedWords code = reinterpret_cast<SignedWords>(fixed >> 16);
    const SignedWords least = (reinterpret_cast<SignedWords>(bits_of(kept)) != 0) & 1;  // true is -1
    store_lowest(code > least ? code : least, last_[i] + place);
  }

  const Row& row_;
  uint32_t seed_;
  Draws draws_, last_draws_;
  uint8_t *codes_[kStates], *last_[kStates];
  Floats units_[kStates], inverses_[kStates], largest_[kStates];
  alignas(64) float kept_[kStates][kCodeBlock] = {};
  alignas(64) uint8_t nothing_[kCodeBlock];  // in the place of the codes before the first unit
};

}  // namespace amp_plugin
