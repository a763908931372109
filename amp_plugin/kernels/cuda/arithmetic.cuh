// What rules compute with on a GPU: a few float32 of a thread. To the bit as csrc/step_arithmetic.h, which
// has vectors.
#pragma once

#include "elements.cuh"

namespace amp_plugin {

// kCount neighbouring elements, which a thread computes side by side: no element waits for another's root or
// quotient.
template <int kCount>
struct Lanes {
  float lane[kCount];
  // Its roots, if a rule has taken them: codes are made of roots, too.
  mutable float root[kCount] = {};
  mutable bool has_roots = false;

  Lanes() = default;
  __device__ explicit Lanes(float value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) lane[i] = value;
  }
};

// Apply a function of one number, of two or of three to each lane.
template <int kCount, typename Function, typename... Other>
__device__ inline Lanes<kCount> each(Function&& function, const Lanes<kCount>& first, const Other&... other) {
  Lanes<kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) result.lane[i] = function(first.lane[i], other.lane[i]...);
  return result;
}

// Whether the magnitudes of all lanes are from `least` to `most`; of a NaN they are not.
template <int kCount>
__device__ inline bool are_moderate(const Lanes<kCount>& lanes, float least, float most) {
  bool moderate = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) moderate &= fabsf(lanes.lane[i]) >= least && fabsf(lanes.lane[i]) <= most;
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
// Rounded as a division. Where nothing comes near the ends of float32's range that takes no branch.
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
  Lanes<kCount> roots;
  if (kCount > 1 && are_moderate(x, 0x1p-100f, 0x1p126f)) {
    roots = each([](float x) { return cuda::moderate_root(x); }, x);
  } else {
    roots = each([](float x) { return sqrtf(x); }, x);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x.root[i] = roots.lane[i];
  x.has_roots = true;
  return roots;
}
template <int kCount>
__device__ inline Lanes<kCount> magnitude(const Lanes<kCount>& x) {
  return each([](float x) { return fabsf(x); }, x);
}
// 1, -1 or 0, of a NaN 0.
template <int kCount>
__device__ inline Lanes<kCount> sign_of(const Lanes<kCount>& x) {
  return each([](float x) { return float(x > 0) - float(x < 0); }, x);
}
// Of numbers without a sign; a NaN is the largest.
template <int kCount>
__device__ inline Lanes<kCount> larger(const Lanes<kCount>& first, const Lanes<kCount>& second) {
  return each([](float a, float b) { return cuda::join_max(a, b); }, first, second);
}

// Division by a number that is the same for all.
struct Divisor {
  float divisor, inverse;

  Divisor() = default;
  __device__ explicit Divisor(float divisor) : divisor(divisor), inverse(1 / divisor) {}
  __device__ bool is_one() const { return divisor == 1; }

  __device__ float divide(float x) const {
    const float quotient = x * inverse;
    // What the quotient is too large by, so that a correction by nothing leaves the sign of a zero as it is.
    // Of an infinity, and where the quotient is one, there is no correction.
    const float excess = fmaf(quotient, divisor, -x);
    const float corrected = fmaf(-excess, inverse, quotient);
    return fabsf(excess) <= cuda::largest(excess) ? corrected : quotient;
  }
  template <int kCount>
  __device__ Lanes<kCount> divide(const Lanes<kCount>& x) const {
    return each([this](float x) { return divide(x); }, x);
  }
};

// A choice between two numbers that is the same for all: the same branch for all threads.
struct Choice {
  bool is_first;

  Choice() = default;
  __device__ explicit Choice(bool first) : is_first(first) {}
  template <int kCount>
  __device__ Lanes<kCount> of(const Lanes<kCount>& first, const Lanes<kCount>& second) const {
    return each([this](float first, float second) { return is_first ? first : second; }, first, second);
  }
};

}  // namespace amp_plugin
