// The arithmetic of the rules on the CPU: vectors of float32.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace amp_plugin {

using Floats = at::vec::Vectorized<float>;

// The bits of a Floats, with the same number of elements.
using Words = uint32_t [[gnu::vector_size(sizeof(Floats))]];

[[gnu::always_inline]] inline Words bits_of(const Floats& floats) {
  Words words;
  floats.store(&words);
  return words;
}

// a * b + c, rounded once.
[[gnu::always_inline]] inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return at::vec::fmadd(a, b, c);
}

[[gnu::always_inline]] inline Floats root(const Floats& x) { return x.sqrt(); }
[[gnu::always_inline]] inline Floats magnitude(const Floats& x) { return x.abs(); }
// Returns 1, -1 or 0. For a NaN it returns 0.
[[gnu::always_inline]] inline Floats sign_of(const Floats& x) {
  return ((x > Floats(0)) & Floats(1)) - ((x < Floats(0)) & Floats(1));
}

// Returns the larger of two numbers whose sign bits are 0. Their bits, compared as integers, have the same
// order as the numbers, and a NaN is the largest.
[[gnu::always_inline]] inline Floats larger(const Floats& first, const Floats& second) {
  const Words bits = bits_of(first), others = bits_of(second);
  const Words larger = bits > others ? bits : others;
  return Floats::loadu(&larger);
}

// Division by a number that is the same for all elements. It is as fast as multiplications, and rounds as a
// division does (Markstein, 1990), except if the result is below float32's normal range.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(double divisor) : divisor_(static_cast<float>(divisor)), inverse_(1 / divisor_) {}

  bool is_one() const { return divisor_ == 1; }

  [[gnu::always_inline]] Floats divide(Floats x) const {
    const Floats quotient = x * Floats(inverse_);
    const Floats rest = at::vec::fmadd(quotient, Floats(-divisor_), x);
    const Floats corrected = at::vec::fmadd(rest, Floats(inverse_), quotient);
    // If the rest is 0, the quotient is exact, including the sign of a zero. For an infinity the rest is a
    // NaN. In both cases the quotient is returned without correction.
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

// Returns above / (divisor.divide(root(x)) + eps).
[[gnu::always_inline]] inline Floats over_root(
    const Floats& above, const Floats& x, const Divisor& divisor, float eps) {
  return above / (divisor.divide(root(x)) + Floats(eps));
}

// A choice between two numbers that is the same for all elements. Both are computed, then one is selected.
// With branches instead, the compiler cannot reorder the instructions of the loop across them, and a step of
// a 16-bit pair takes 1.4 times as long.
class Choice {
 public:
  explicit Choice(bool first) : mask_(first ? ~Mask{0} : Mask{0}) {}

  [[gnu::always_inline]] Floats of(const Floats& first, const Floats& second) const {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_mask_blend_ps(mask_, second, first);
#else
    return Floats::blendv(second, first, Floats(std::bit_cast<float>(mask_)));
#endif
  }

 private:
#if defined(CPU_CAPABILITY_AVX512)
  using Mask = __mmask16;
#else
  using Mask = uint32_t;
#endif
  Mask mask_;
};

// Return true if a branch skips both choices because neither takes the first number. The CPU has no branches.
constexpr bool jumps_over(const Choice&, const Choice&) { return false; }

}  // namespace amp_plugin
