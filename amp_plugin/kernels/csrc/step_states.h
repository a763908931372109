// Loads an optimizer's states as blocks of float32 lanes, and stores them, in each storage format.
// docs/decisions/compressed_state.md gives the reasons.
//
//   float32    as they are. States that are weights are always float32.
//   bfloat16   kSigned rounded to nearest, squares up or down at random
//   codes      blocks of kCodeBlock bytes and one float32, the block's unit:
//              kSigned   code * |code| * unit, code in -127..127, rounded to nearest
//              squares   (code * unit)^2, code in 0..255, rounded up or down at random; 0 only for 0
//
// A second moment changes by 1/1000 of its value per step. That is less than half of the distance between two
// 8-bit codes, so rounding to nearest would never change it. The random bits of an element depend only on its
// position and on the number of the step.
#pragma once

#include <array>
#include <cmath>
#include <utility>

#include "step_rows.h"
#include "step_weights.h"

namespace amp_plugin {

// Integers, as many as Floats has elements.
using Numbers = int32_t [[gnu::vector_size(sizeof(Floats))]];
// Bytes, four times as many as Floats has elements.
using Bytes = uint8_t [[gnu::vector_size(sizeof(Floats))]];

[[gnu::always_inline]] inline Numbers truncated(const Floats& floats) {
  using Vector = float [[gnu::vector_size(sizeof(Floats))]];
  return __builtin_convertvector(reinterpret_cast<Vector>(bits_of(floats)), Numbers);
}

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
  float numbers[Block::kHalf];
  for (int64_t i = 0; i < Block::kHalf; ++i) numbers[i] = data[i];
  return Floats::loadu(numbers);
#endif
}

// Converts four vectors of numbers to bytes, with saturation. The bytes are in the order in which the packing
// instructions leave them; store_bytes() restores the order.
template <typename Byte>
[[gnu::always_inline]] inline Bytes packed(const Numbers (&numbers)[4]) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto vector = [&](int i) { return reinterpret_cast<__m512i>(numbers[i]); };
  const __m512i first = _mm512_packs_epi32(vector(0), vector(1));
  const __m512i second = _mm512_packs_epi32(vector(2), vector(3));
  return reinterpret_cast<Bytes>(
      std::is_signed_v<Byte> ? _mm512_packs_epi16(first, second) : _mm512_packus_epi16(first, second));
#elif defined(CPU_CAPABILITY_AVX2)
  const auto vector = [&](int i) { return reinterpret_cast<__m256i>(numbers[i]); };
  const __m256i first = _mm256_packs_epi32(vector(0), vector(1));
  const __m256i second = _mm256_packs_epi32(vector(2), vector(3));
  return reinterpret_cast<Bytes>(
      std::is_signed_v<Byte> ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second));
#else
  Bytes bytes;
  for (size_t i = 0; i < sizeof(Bytes); ++i) {
    const int32_t number = numbers[i / Block::kHalf][i % Block::kHalf];
    bytes[i] = static_cast<uint8_t>(
        std::clamp<int32_t>(number, std::numeric_limits<Byte>::min(), std::numeric_limits<Byte>::max()));
  }
  return bytes;
#endif
}

[[gnu::always_inline]] inline void store_bytes(Bytes bytes, uint8_t* data) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  bytes = reinterpret_cast<Bytes>(_mm512_permutexvar_epi32(order, reinterpret_cast<__m512i>(bytes)));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
  bytes = reinterpret_cast<Bytes>(_mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(bytes), order));
#endif
  std::memcpy(data, &bytes, sizeof(bytes));
}

using cuda::Draws;

// A table of the high bytes of Draws, times `unit`. A block begins at index Draws::first.
template <typename T>
constexpr auto spread(T unit) {
  std::array<T, 256 + kCodeBlock> draws{};
  for (uint32_t i = 0; i < draws.size(); ++i) draws[i] = static_cast<T>(i * cuda::kStride % 256) * unit;
  return draws;
}

// The states of a row as float32 numbers. `List` is the rule's StateList; T is float or at::BFloat16.
//
// The formats share this interface. begin(at) starts a unit of kUnit elements. Then each block of the unit is
// loaded and stored at its `place` in the unit, and end() closes the unit. flush() is called after the last
// unit.
template <typename List, typename T>
class PlainStates {
  static constexpr size_t kStates = List::kCount;
  static constexpr bool kIsFloat = std::is_same_v<T, float>;

 public:
  static constexpr int64_t kUnit = kIsFloat ? Block::kSize : kCodeBlock;

  [[gnu::always_inline]] PlainStates(const Row& row, uint32_t seed) : row_(row), seed_(seed) {}
  [[gnu::always_inline]] void begin(int64_t at) {
    at_ = at;
    if constexpr (kIsFloat) return;
    for (size_t i = 0; i < kStates; ++i) {
      if (rules::is_square(List::kind(i)))
        draws_[i] = Draws((row_.offset + at) / kCodeBlock, seed_, List::kind(i));
    }
  }
  [[gnu::always_inline]] Block load(size_t i, int64_t place) const { return load_block(data(i) + place); }
  [[gnu::always_inline]] void store(size_t i, int64_t place, const Block& block) {
    if (kIsFloat || List::kind(i) == rules::kSigned) return store_block(data(i) + place, block);
    const Halves halves({drawn(i, block.low, place), drawn(i, block.high, place + Block::kHalf)});
    std::memcpy(data(i) + place, &halves.high, sizeof(halves.high));
  }
  [[gnu::always_inline]] void end() const {}
  [[gnu::always_inline]] void flush() const {}

 private:
  [[gnu::always_inline]] T* data(size_t i) const { return static_cast<T*>(row_.states[i]) + at_; }
  [[gnu::always_inline]] Words drawn(size_t i, const Floats& values, int64_t place) const {
    static constexpr auto kSpread = spread<uint32_t>(0x100);
    Words draws;
    std::memcpy(&draws, &kSpread[draws_[i].first + place], sizeof(draws));
    return bits_of(values) + draws + draws_[i].low;
  }

  const Row& row_;
  int64_t at_ = 0;
  uint32_t seed_;
  Draws draws_[kStates + 1] = {};
};

// A unit is encoded only after the next one has been computed. Otherwise the processor would have to wait for
// the unit's largest element, which takes a fifth of a step.
template <typename List>
class CodedStates {
  static constexpr size_t kStates = List::kCount;

 public:
  static constexpr int64_t kUnit = kCodeBlock;

  [[gnu::always_inline]] CodedStates(const Row& row, uint32_t seed) : row_(row), seed_(seed) {
    for (size_t i = 0; i < kStates; ++i) codes_[i] = nothing_;
  }

  [[gnu::always_inline]] void begin(int64_t at) {
    std::swap(kept_, last_kept_);
    for (size_t i = 0; i < kStates; ++i) {
      if (is_weight(i)) continue;
      last_[i] = codes_[i];
      last_draws_[i] = draws_[i];
      draws_[i] = Draws((row_.offset + at) / kCodeBlock, seed_, List::kind(i));
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
    keep(i, place, block.low);
    keep(i, place + Block::kHalf, block.high);
  }

  [[gnu::always_inline]] void end() {
    encode(last_kept_);
    for (size_t i = 0; i < kStates; ++i) {
      if (is_weight(i)) continue;
      float most = largest(largest_[i]);
      const float limit = is_signed(i) ? kMostSigned : kMostRoot;
      if (__builtin_expect(most > limit, false)) {
        most = limit;
        for (float& number : (*kept_)[i]) number = std::clamp(number, -limit, limit);
      }
      const float unit = most * (is_signed(i) ? kSignedUnit : kUnsignedUnit);
      inverses_[i] = Floats(unit > kLeastUnit ? 1 / unit : 0);
      std::memcpy(codes_[i] + kCodeBlock, &unit, sizeof(float));
    }
  }

  [[gnu::always_inline]] void flush() {
    for (size_t i = 0; i < kStates; ++i) {
      last_[i] = codes_[i];
      last_draws_[i] = draws_[i];
    }
    encode(kept_);
  }

 private:
  using Kept = std::array<std::array<float, kCodeBlock>, kStates>;

  static constexpr float kSignedUnit = static_cast<float>(1.0 / (127 * 127));
  static constexpr float kUnsignedUnit = static_cast<float>(1.0 / 255);
  // for a smaller unit all codes are 0, as its inverse might be infinite
  static constexpr float kLeastUnit = 0x1p-120F;
  // The largest values that are stored, of a first moment and of the root of a second moment. With an
  // infinite unit, a code of 0 would be decoded as a NaN.
  static constexpr float kMostSigned = 0x1p127F, kMostRoot = 0x1p63F;

  static constexpr bool is_signed(size_t i) { return List::kind(i) == rules::kSigned; }
  static constexpr bool is_weight(size_t i) { return List::kind(i) == rules::kWeight; }

  [[gnu::always_inline]] Floats decoded(size_t i, int64_t place) const {
    if (is_signed(i)) {
      const Floats code = load_bytes(reinterpret_cast<const int8_t*>(codes_[i]) + place);
      return code * code.abs() * units_[i];
    }
    const Floats root = load_bytes(codes_[i] + place) * units_[i];
    return root * root;
  }

  // Keeps the values until the largest of the unit is known: a first moment itself, or the root of a second
  // moment.
  [[gnu::always_inline]] void keep(size_t i, int64_t place, const Floats& value) {
    const Floats root = value.sqrt().abs();  // abs() removes the sign of a NaN
    (is_signed(i) ? value : root).store(&(*kept_)[i][place]);
    largest_[i] = larger(is_signed(i) ? value.abs() : root, largest_[i]);
  }

  [[gnu::always_inline]] static float largest(const Floats& lanes) {
    return at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return larger(a, b); }, lanes);
  }

  // Encodes the values kept of the previous unit.
  [[gnu::always_inline]] void encode(const Kept* kept) {
    for (size_t i = 0; i < kStates; ++i) {
      if (is_weight(i)) continue;
      for (int64_t place = 0; place < kCodeBlock; place += sizeof(Bytes)) {
        Floats values[4];
        for (int k = 0; k < 4; ++k) values[k] = Floats::loadu(&(*kept)[i][place + k * Block::kHalf]);
        store_bytes(
            is_signed(i) ? signed_codes(i, values) : square_codes(i, place, values), last_[i] + place);
      }
    }
  }

  [[gnu::always_inline]] Bytes signed_codes(size_t i, const Floats (&values)[4]) const {
    Numbers codes[4];
    for (int k = 0; k < 4; ++k) {
      const Floats root = (values[k].abs() * inverses_[i]).sqrt() + Floats(0.5F);
      codes[k] = truncated(root ^ (values[k] & Floats(-0.0F)));
    }
    return packed<int8_t>(codes);
  }

  // A nonzero root must get a code of at least 1. Its bits, read as an integer and saturated to a byte, are
  // nonzero.
  [[gnu::always_inline]] Bytes square_codes(size_t i, int64_t place, const Floats (&roots)[4]) const {
    static constexpr auto kSpread = spread<float>(0x1p-8F);
    const Floats low(static_cast<float>(last_draws_[i].low) * 0x1p-16F);
    const float* draws = &kSpread[last_draws_[i].first + place];
    Numbers codes[4], bits[4];
    for (int k = 0; k < 4; ++k) {
      const Floats code = at::vec::fmadd(roots[k], inverses_[i], low);
      codes[k] = truncated(code + Floats::loadu(draws + k * Block::kHalf));
      bits[k] = reinterpret_cast<Numbers>(bits_of(roots[k]));
    }
    const Bytes code = packed<uint8_t>(codes), least = packed<uint8_t>(bits) & 1;
    return code > least ? code : least;
  }

  const Row& row_;
  uint32_t seed_;
  Draws draws_[kStates] = {}, last_draws_[kStates];
  uint8_t *codes_[kStates], *last_[kStates];
  Floats units_[kStates], inverses_[kStates], largest_[kStates];
  alignas(64) Kept memory_[2] = {};
  Kept *kept_ = &memory_[0], *last_kept_ = &memory_[1];
  alignas(64) uint8_t nothing_[kCodeBlock];  // stands in for the previous unit's codes before there are any
};

}  // namespace amp_plugin
