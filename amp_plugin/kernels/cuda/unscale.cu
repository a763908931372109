// unscale: multiply all gradients by inv_scale in place and measure them on the way.
//
// Compiled once for each norm, as norm_check. An inv_scale of exactly 1 writes nothing.
// Bytes: B read, B written (0 if 1), 16 per block written.
#include "measure.cuh"

using namespace amp_plugin;

extern "C" __global__ void __launch_bounds__(kThreads, 4) unscale(
    const Row* rows, u32 count, u32 chunk_bytes, double p, DeviceScalar inv_scale, Partial* partials) {
  measure_block<NORM, true>(rows, count, chunk_bytes, NORM::of(p), inv_scale.read(), partials);
}
