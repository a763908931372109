// The arithmetic of the rules on a GPU: a few float32 elements of one thread. It gives the same bits as
// csrc/step_arithmetic.h, which computes with vectors.
#pragma once

#include "elements.cuh"

namespace amp_plugin {

// kCount neighboring elements, which one thread computes. The elements do not depend on each other, so the
// GPU overlaps their square roots and divisions.
template <int kCount>
struct Lanes {
  float lane[kCount];
  // The square roots of the lanes, if a rule has computed them. Encoding a square to 8 bits uses them again.
  mutable float root[kCount] = {};
  mutable bool has_roots = false;

  Lanes() = default;
  __device__ explicit Lanes(float value) {
    for (int i = 0; i < kCount; ++i) lane[i] = value;
  }
};

// Returns the lanes function(0), function(1), and so on.
template <int kCount, typename Function>
__device__ inline Lanes<kCount> made(Function&& function) {
  Lanes<kCount> lanes;
  for (int i = 0; i < kCount; ++i) lanes.lane[i] = function(i);
  return lanes;
}

// Applies a function of one, two or three numbers to each lane.
template <int kCount, typename Function, typename... Other>
__device__ inline Lanes<kCount> each(Function&& function, const Lanes<kCount>& first, const Other&... other) {
  Lanes<kCount> result;
  for (int i = 0; i < kCount; ++i) result.lane[i] = function(first.lane[i], other.lane[i]...);
  return result;
}

// Return true if the magnitudes of all lanes are between `least` and `most`. False if one is a NaN.
template <int kCount>
__device__ inline bool are_moderate(const Lanes<kCount>& lanes, float least, float most = cuda::kNoLimit) {
  bool moderate = true;
  for (float x : lanes.lane) moderate &= fabsf(x) >= least && (most == cuda::kNoLimit || fabsf(x) <= most);
  return moderate;
}

template <int kCount>
__device__ inline Lanes<kCount> operator-(const Lanes<kCount>& x) {
  return each([](float x) { return -x; }, x);
}
template <int kCount>
__device__ inline Lanes<kCount> operator+(const Lanes<kCount>& a, const Lanes<kCount>& b) {
  return each([](float a, float b) { return a + b; }, a, b);
}
template <int kCount>
__device__ inline Lanes<kCount> operator-(const Lanes<kCount>& a, const Lanes<kCount>& b) {
  return each([](float a, float b) { return a - b; }, a, b);
}
template <int kCount>
__device__ inline Lanes<kCount> operator*(const Lanes<kCount>& a, const Lanes<kCount>& b) {
  return each([](float a, float b) { return a * b; }, a, b);
}
// Divides and rounds to nearest, as IEEE 754 requires. If all operands are far from the ends of float32's
// range, one branch decides for all lanes; otherwise each lane takes branches of its own.
template <int kCount>
__device__ inline Lanes<kCount> operator/(const Lanes<kCount>& a, const Lanes<kCount>& b) {
  if constexpr (kCount > 1) {
    if (are_moderate(a, 0x1p-95f, 0x1p62f) && are_moderate(b, 0x1p-64f, 0x1p30f))
      return each([](float a, float b) { return cuda::moderate_quotient(a, b); }, a, b);
  }
  return each([](float a, float b) { return a / b; }, a, b);
}

// a * b + c, rounded once.
template <int kCount>
__device__ inline Lanes<kCount> multiply_add(
    const Lanes<kCount>& a, const Lanes<kCount>& b, const Lanes<kCount>& c) {
  return each([](float a, float b, float c) { return fmaf(a, b, c); }, a, b, c);
}
template <int kCount>
__device__ inline Lanes<kCount> root(const Lanes<kCount>& x) {
  const Lanes<kCount> roots = kCount > 1 && are_moderate(x, 0x1p-100f, 0x1p126f)
      ? each([](float x) { return cuda::moderate_root(x); }, x)
      : each([](float x) { return sqrtf(x) + 0.0f; }, x);  // -0 becomes 0
  memcpy(x.root, roots.lane, sizeof(x.root)), x.has_roots = true;
  return roots;
}
template <int kCount>
__device__ inline Lanes<kCount> magnitude(const Lanes<kCount>& x) {
  return each([](float x) { return fabsf(x); }, x);
}
// Returns 1, -1 or 0. For a NaN it returns 0.
template <int kCount>
__device__ inline Lanes<kCount> sign_of(const Lanes<kCount>& x) {
  return each([](float x) { return float(x > 0) - float(x < 0); }, x);
}
// Returns the larger of two numbers whose sign bits are 0. A NaN is the largest.
template <int kCount>
__device__ inline Lanes<kCount> larger(const Lanes<kCount>& first, const Lanes<kCount>& second) {
  return each([](float a, float b) { return cuda::join_max(a, b); }, first, second);
}

// Division by a number that is the same for all elements.
struct Divisor {
  float divisor, inverse;

  Divisor() = default;
  __device__ explicit Divisor(float divisor) : divisor(divisor), inverse(1 / divisor) {}
  __device__ bool is_one() const { return divisor == 1; }

  // Returns how much x * inverse is too large, times the divisor. It is not finite if x or the quotient is
  // infinite.
  __device__ float excess(float x) const { return fmaf(x * inverse, divisor, -x); }
  // Divides if the excess is finite. It is subtracted, and subtracting 0 keeps the sign of a zero.
  __device__ float divide_finite(float x) const { return fmaf(-excess(x), inverse, x * inverse); }
  template <int kCount>
  __device__ Lanes<kCount> divide(const Lanes<kCount>& x) const {
    float total = fabsf(excess(x.lane[0]));
    for (int i = 1; i < kCount; ++i) total += fabsf(excess(x.lane[i]));
    if (total <= cuda::largest(total)) return each([this](float x) { return divide_finite(x); }, x);
    return each([this](float x) { return cuda::is_finite(excess(x)) ? divide_finite(x) : x * inverse; }, x);
  }
};

// Returns above / (divisor.divide(root(x)) + eps). One branch decides for all lanes that all numbers are far
// from the ends of float32's range. An infinite or negative x then gives a NaN as the denominator.
template <int kCount>
__device__ inline Lanes<kCount> over_root(
    const Lanes<kCount>& above, const Lanes<kCount>& x, const Divisor& divisor, float eps) {
  if constexpr (kCount > 1) {
    const auto roots = each([](float x) { return cuda::moderate_root(x); }, x);
    const auto below = each([&](float root) { return divisor.divide_finite(root) + eps; }, roots);
    if (are_moderate(x, 0x1p-100f) & are_moderate(above, 0x1p-95f, 0x1p62f) &
        are_moderate(below, 0x1p-64f, 0x1p30f)) {
      memcpy(x.root, roots.lane, sizeof(x.root)), x.has_roots = true;
      return each([](float a, float b) { return cuda::moderate_quotient(a, b); }, above, below);
    }
  }
  return above / (divisor.divide(root(x)) + Lanes<kCount>(eps));
}

// A choice between two numbers that is the same for all elements, so all threads take the same branch.
struct Choice {
  bool is_first;

  __device__ explicit Choice(bool first) : is_first(first) {}
  template <int kCount>
  __device__ Lanes<kCount> of(const Lanes<kCount>& first, const Lanes<kCount>& second) const {
    return each([this](float first, float second) { return is_first ? first : second; }, first, second);
  }
};

// Return true if a branch skips both choices because neither takes the first number.
__device__ inline bool jumps_over(const Choice& a, const Choice& b) { return !(a.is_first | b.is_first); }

}  // namespace amp_plugin
