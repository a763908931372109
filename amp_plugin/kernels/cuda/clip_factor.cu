// clip_factor: what clipping multiplies gradients by, or what a fused optimizer divides scaled ones by.
//
// One thread in place of some ten launches; the formula is in kernels/reference.py.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void clip_factor(
    const float* norm, float max_norm, const float* scale, const float* found_inf, float* out) {
  const float factor = max_norm / (*norm + 1e-6f);
  const bool skipped = found_inf == nullptr ? !is_finite(*norm) : *found_inf > 0;
  const float clipped = skipped || factor > 1 ? 1.0f : factor;
  *out = scale == nullptr ? clipped : *scale / clipped;
}
