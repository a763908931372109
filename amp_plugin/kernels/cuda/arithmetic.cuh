// What rules compute with on a GPU: one float32. To the bit as csrc/step_arithmetic.h, which has vectors.
#pragma once

#include "elements.cuh"

namespace amp_plugin {

// a * b + c, rounded once.
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline float magnitude(float x) { return fabsf(x); }
// 1, -1 or 0, of a NaN 0.
__device__ inline float sign_of(float x) { return float(x > 0) - float(x < 0); }
// Of numbers without a sign; a NaN is the largest.
__device__ inline float larger(float first, float second) { return cuda::join_max(first, second); }

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
};

// A choice between two numbers that is the same for all: the same branch for all threads.
struct Choice {
  bool is_first;

  Choice() = default;
  __device__ explicit Choice(bool first) : is_first(first) {}
  __device__ float of(float first, float second) const { return is_first ? first : second; }
};

}  // namespace amp_plugin
