// clip_factor: the factor that clipping multiplies gradients by. If a scale is given, the scale divided by
// that factor, which a fused optimizer divides scaled gradients by.
//
// One thread replaces about ten launches.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void clip_factor(
    const float* norm, float max_norm, const float* scale, const float* found_inf, float* out) {
  write_clip_factor(norm, max_norm, scale, found_inf, out);
}
