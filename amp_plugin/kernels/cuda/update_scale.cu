// update_scale: adjust a loss scale after a step. One thread does it. The rule is in kernels/reference.py.
#include "elements.cuh"

using namespace amp_plugin::cuda;

constexpr int kRestoreOnSuccess = 0, kNeverBelowOne = 2;  // values of hysteresis_mode

extern "C" __global__ void update_scale(
    float* scale, int* growth_tracker, int* hysteresis_tracker, const float* found_inf, double growth_factor,
    double backoff_factor, int growth_interval, float min_scale, float max_scale, int hysteresis,
    int hysteresis_mode) {
  if (*found_inf > 0) {
    const int left = *hysteresis_tracker;
    const bool spent = left <= 1;
    *growth_tracker = 0;
    if (!(spent && hysteresis_mode == kNeverBelowOne)) *hysteresis_tracker = left - 1;
    if (spent) {
      const float floor = *scale < min_scale ? *scale : min_scale;  // lowering must never raise the scale
      const float lower = static_cast<float>(*scale * backoff_factor);  // computed in double, as torch does
      *scale = lower < floor ? floor : lower;
    }
    return;
  }
  const int steps = *growth_tracker + 1;
  const bool grows = steps >= growth_interval;
  if (grows || hysteresis_mode == kRestoreOnSuccess) *hysteresis_tracker = hysteresis;
  *growth_tracker = grows ? 0 : steps;
  if (grows) {
    const float ceiling = *scale > max_scale ? *scale : max_scale;  // raising must never lower the scale
    const float higher = static_cast<float>(*scale * growth_factor);
    if (is_finite(higher)) *scale = higher > ceiling ? ceiling : higher;
  }
}
