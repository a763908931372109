// clip_factor: what clipping multiplies gradients by, or what a fused optimizer divides scaled ones by.
//
// One thread in place of some ten launches; the formula is in kernels/reference.py.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void clip_factor(const float* norm, float max_norm, const float* scale, float* out) {
  const float factor = max_norm / (*norm + 1e-6f);
  const float clipped = is_finite(*norm) && !(factor > 1) ? factor : 1.0f;
  *out = scale == nullptr ? clipped : *scale / clipped;
}
