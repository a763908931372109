// update_scale: adjust a loss scale after a step. One thread does it.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void update_scale(
    float* scale, int* growth_tracker, int* hysteresis_tracker, const float* found_inf, ScaleRule rule) {
  adjust_scale(scale, growth_tracker, hysteresis_tracker, found_inf, rule);
}
