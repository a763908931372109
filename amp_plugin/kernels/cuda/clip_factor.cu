// clip_factor: what clipping multiplies gradients by, or what a fused optimizer divides scaled ones by.
//
// One thread in place of some ten launches; the formula is in kernels/reference.py.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void clip_factor(
    const float* norm, float max_norm, const float* scale, const float* found_inf, float* out) {
  const float clipped = clip_factor_of(*norm, max_norm, found_inf);
  *out = scale == nullptr ? clipped : *scale / clipped;
}
