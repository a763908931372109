// clip_factor: compute the factor that clips gradients. If a loss scale is given, the result is the scale
// divided by the factor, because a fused optimizer divides scaled gradients by that number.
//
// This one thread replaces about ten launches of torch's ops.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void clip_factor(
    const float* norm, float max_norm, const float* scale, const float* found_inf, float* out) {
  write_clip_factor(norm, max_norm, scale, found_inf, out);
}
