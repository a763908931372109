// Norms as reductions: the contribution of a magnitude, how contributions are joined, and when float32 is
// exact enough.
//
// A thread joins the contributions of one group of loads in the wide type of the elements. If the result is
// `trusted`, no element was inf or NaN and nothing was lost. So one comparison per group replaces a test of
// every element. Otherwise the group is processed again, element by element, in float64, where the square of
// every float32 number is in range. The results of groups are joined in float64.
#pragma once

#include "elements.cuh"

namespace amp_plugin::cuda {

struct Squares {  // p = 2
  static constexpr bool kOfComponents = true;  // |z|^2 is the sum of two squares
  static constexpr bool kHidesNonFinite = false;
  __device__ static Squares of(double) { return {}; }
  __device__ bool counts() const { return false; }
  __device__ bool ignores_zeros() const { return true; }
  __device__ double identity() const { return 0; }
  template <typename Wide>
  __device__ Wide join(Wide a, Wide b) const {
    return a + b;
  }
  template <typename Wide, int kCount>
  __device__ Wide add(Wide total, const Wide (&magnitudes)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) total = fma(magnitudes[i], magnitudes[i], total);
    return total;
  }
  // Below 2^-100 the squares of small elements may have underflowed.
  __device__ bool trusted(float total) const { return total >= 7.88860905e-31f && total <= largest(total); }
  __device__ bool trusted(double total) const { return total <= largest(total); }
  __device__ double root(double total) const { return sqrt(total); }
};

struct Maximum {  // p = inf
  static constexpr bool kOfComponents = false, kHidesNonFinite = false;
  __device__ static Maximum of(double) { return {}; }
  __device__ bool counts() const { return false; }
  __device__ bool ignores_zeros() const { return true; }
  __device__ double identity() const { return 0; }
  template <typename Wide>
  __device__ Wide join(Wide a, Wide b) const {
    return join_max(a, b);
  }
  template <typename Wide, int kCount>
  __device__ Wide add(Wide total, const Wide (&magnitudes)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) total = join_max(total, magnitudes[i]);
    return total;
  }
  template <typename Wide>
  __device__ bool trusted(Wide total) const {
    return total <= largest(total);
  }
  __device__ double root(double total) const { return total; }
};

// Not inlined: it is some hundred instructions, and would be repeated for each of a thread's elements.
__device__ __noinline__ double power(double base, double exponent) { return pow(base, exponent); }

// Any other p. p = 0 counts the nonzero elements, and p = -inf takes the smallest magnitude.
//
// In float32, a whole p up to kMostFactors multiplies an element by itself. Any other p of moderate size uses
// the GPU's approximations of the logarithm and of the power of two. An element is 2^e * m, where
// 1 <= m < 2, and becomes 2^(p * e) * 2^(p * log2(m)). The first exponent is split exactly into a whole
// number and a rest. So the error of the norm is below 8e-7, whatever the size of the elements. In float64,
// `pow` is used.
struct Power {
  static constexpr bool kOfComponents = false, kHidesNonFinite = true;
  enum Way { kAdds, kCounts, kTakesLeast, kMultiplies, kApproximates, kExactly };
  static constexpr int kMostFactors = 32;
  static constexpr double kMostApproximated = 4, kLeastApproximated = 0.5;

  double p;
  Way way;
  float high, low;  // their sum is p
  float least;  // in a float32 sum below this, small elements may be missing

  __device__ static Power of(double p) {
    Power norm{p, kExactly, float(p), float(p - float(p)), 0};
    if (p == 0) {
      norm.way = kCounts;
    } else if (p < -largest(p)) {
      norm.way = kTakesLeast;
    } else if (p == 1) {
      norm.way = kAdds;
    } else if (p > 1 && p <= kMostFactors && p == floor(p)) {
      norm.way = kMultiplies;
      norm.least = 7.88860905e-31f;  // 2^-100
    } else if (fabs(p) >= kLeastApproximated && fabs(p) <= kMostApproximated) {
      norm.way = kApproximates;
      // Elements below 2^-126 are treated as 0, and so are powers below 2^-121.
      const float without_least = p > 0 ? exp2f(float(30 - 126 * p)) : 0;
      norm.least = without_least > 8.07793567e-28f ? without_least : 8.07793567e-28f;  // 2^-90
    }
    return norm;
  }
  __device__ bool counts() const { return way == kCounts; }
  __device__ bool ignores_zeros() const { return p > 0; }
  __device__ double identity() const { return way == kTakesLeast ? largest(p) * 2 : 0; }

  template <typename Wide>
  __device__ Wide join(Wide a, Wide b) const {
    if (way == kTakesLeast) return b < a || b != b ? b : a;
    return a + b;
  }

  template <typename Wide, int kCount>
  __device__ Wide add(Wide total, const Wide (&magnitudes)[kCount]) const {
    Wide powers[kCount];
    raise(magnitudes, powers);
#pragma unroll
    for (int i = 0; i < kCount; ++i) total = join(total, powers[i]);
    return total;
  }

  __device__ bool trusted(float total) const {
    return way != kExactly && total >= least && total <= largest(total);
  }
  __device__ bool trusted(double total) const { return total <= largest(total); }
  __device__ double root(double total) const {
    return way == kCounts || way == kAdds || way == kTakesLeast ? total : power(total, 1 / p);
  }

 private:
  template <int kCount>
  __device__ void raise(const double (&magnitudes)[kCount], double (&powers)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) powers[i] = exactly(magnitudes[i]);
  }

  // All threads of a block take the same branch.
  template <int kCount>
  __device__ void raise(const float (&magnitudes)[kCount], float (&powers)[kCount]) const {
    if (way == kApproximates) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) powers[i] = raised(magnitudes[i]);
    } else if (way == kMultiplies) {
      multiply(magnitudes, powers);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) powers[i] = way == kCounts ? float(magnitudes[i] != 0) : magnitudes[i];
    }
  }

  template <int kCount>
  __device__ void multiply(const float (&magnitudes)[kCount], float (&powers)[kCount]) const {
    float squares[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) squares[i] = magnitudes[i], powers[i] = 1;
    for (u32 left = u32(p);; left /= 2) {
      if (left % 2 == 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) powers[i] *= squares[i];
      }
      if (left < 2) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) squares[i] *= squares[i];
    }
  }

  __device__ double exactly(double magnitude) const {
    if (way == kCounts) return double(magnitude != 0);
    return way == kAdds || way == kTakesLeast ? magnitude : power(magnitude, p);
  }
  __device__ float raised(float magnitude) const {
    // 1.5 * 2^23: adding a number to it rounds that number to a whole number
    constexpr float kRounds = 12582912;
    constexpr float kLeastNormal = 1.17549435e-38f;
    const u32 bits = __float_as_uint(magnitude);
    const float exponent = __uint_as_float((bits >> 23) | 0x4b000000u) - 8388735.0f;  // 2^23 + 127
    const float fraction = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
    const float whole = fmaf(high, exponent, kRounds);
    const float rest = fmaf(low, exponent, fmaf(high, exponent, kRounds - whole));
    const float factor = exp2_approximate(fmaf(high, log2_approximate(fraction), rest));
    const float within = whole < kRounds - 127 ? kRounds - 127
        : whole > kRounds + 128                ? kRounds + 128
                                               : whole;
    const float result = factor * __uint_as_float((__float_as_uint(within) << 23) + 0x3f800000u);
    const float of_zero = p > 0 ? 0.0f : 2 * largest(result);
    return magnitude < kLeastNormal ? of_zero : result;
  }
};

// The result so far of a thread, a warp or a block.
struct Measured {
  double total;
  u32 bits;  // kHasInf and kHasNan for the elements read, and, shifted by kWritten, for those written
};

constexpr u32 kWritten = 2;

}  // namespace amp_plugin::cuda
