// The arithmetic of the measurements that ranks add up. kernels/reference.py describes the layout.
#pragma once

#include "norms.cuh"

namespace amp_plugin::cuda {

__device__ inline bool is_infinite(double p) { return fabs(p) > largest(p); }

__device__ inline double neutral(double p) { return p < 0 && is_infinite(p) ? p : 0; }

__device__ inline double join_powers(double a, double b, double p) {
  return is_infinite(p) ? join_max(a, b) : a + b;
}

// Returns value^exponent, to convert norms to the powers that are added, and back. For p = 0 and p = inf the
// value stays as it is; for p = -inf it is negated.
__device__ inline double raised(double value, double exponent, double p) {
  if (p == 0 || is_infinite(p)) return p < 0 ? -value : value;
  if (exponent == 2) return value * value;
  if (exponent == 0.5) return sqrt(value);
  return exponent == 1 ? value : pow(value, exponent);
}

}  // namespace amp_plugin::cuda
