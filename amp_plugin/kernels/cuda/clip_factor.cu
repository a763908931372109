// clip_factor: the factor that clipping multiplies gradients by. If a scale is given, the scale divided by
// that factor, which a fused optimizer divides scaled gradients by.
//
// One thread replaces about ten launches. The formula is in kernels/reference.py.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void clip_factor(
    const float* norm, float max_norm, const float* scale, const float* found_inf, float* out) {
  const float clipped = clip_factor_of(*norm, max_norm, found_inf);
  *out = scale == nullptr ? clipped : *scale / clipped;
}
