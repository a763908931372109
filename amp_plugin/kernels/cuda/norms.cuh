// Norms as reductions: what a magnitude contributes, how contributions join, when fp32 suffices.
//
// A thread joins the contributions of one group of loads in the elements' own wide type. If the
// result is `trusted`, no element was inf or nan and nothing was lost, so one comparison a group
// replaces a test of every element. Otherwise the group is gone through again element by element,
// in fp64, where the square of every fp32 number is representable. Groups join in fp64.
#pragma once

#include "elements.cuh"

namespace amp_plugin::cuda {

struct Squares {  // p = 2
  static constexpr bool kOfComponents = true;  // |z|^2 is the sum of two squares
  __device__ static Squares of(double) { return {}; }
  __device__ bool counts() const { return false; }
  __device__ double identity() const { return 0; }
  template <typename Wide>
  __device__ Wide join(Wide a, Wide b) const {
    return a + b;
  }
  template <typename Wide>
  __device__ Wide add(Wide total, Wide magnitude) const {
    return fma(magnitude, magnitude, total);
  }
  // Below 2^-100 squares of small elements may have been lost.
  __device__ bool trusted(float total) const { return total >= 7.88860905e-31f && total <= largest(total); }
  __device__ bool trusted(double total) const { return total <= largest(total); }
  __device__ double root(double total) const { return sqrt(total); }
};

struct Maximum {  // p = inf
  static constexpr bool kOfComponents = false;
  __device__ static Maximum of(double) { return {}; }
  __device__ bool counts() const { return false; }
  __device__ double identity() const { return 0; }
  template <typename Wide>
  __device__ Wide join(Wide a, Wide b) const {
    return join_max(a, b);
  }
  template <typename Wide>
  __device__ Wide add(Wide total, Wide magnitude) const {
    return join_max(total, magnitude);
  }
  template <typename Wide>
  __device__ bool trusted(Wide total) const {
    return total <= largest(total);
  }
  __device__ double root(double total) const { return total; }
};

// Called, not inlined: some hundred instructions for each of a thread's elements.
__device__ __noinline__ double power(double base, double exponent) { return pow(base, exponent); }

struct Power {  // any other p; p = 0 counts the elements that are not zero, p = -inf takes the least
  static constexpr bool kOfComponents = false;
  double p;
  __device__ static Power of(double p) { return {p}; }
  __device__ bool counts() const { return p == 0; }
  __device__ bool is_least() const { return p < -largest(p); }
  __device__ double identity() const { return is_least() ? largest(p) * 2 : 0; }
  template <typename Wide>
  __device__ Wide join(Wide a, Wide b) const {
    if (is_least()) return b < a || b != b ? b : a;
    return a + b;
  }
  template <typename Wide>
  __device__ Wide add(Wide total, Wide magnitude) const {
    if (p == 1 || is_least()) return join(total, magnitude);
    return total + (counts() ? Wide(magnitude != 0) : Wide(power(double(magnitude), p)));
  }
  template <typename Wide>
  __device__ bool trusted(Wide) const {
    return false;  // powers leave the range of fp32, and a minimum hides inf
  }
  __device__ double root(double total) const {
    return counts() || p == 1 || is_least() ? total : power(total, 1 / p);
  }
};

// What a thread, a warp or a block knows so far.
struct Measured {
  double total;
  u32 bits;  // kHasInf, kHasNan of the elements; the same two, shifted by kWritten, of what was written
};

constexpr u32 kWritten = 2;

}  // namespace amp_plugin::cuda
