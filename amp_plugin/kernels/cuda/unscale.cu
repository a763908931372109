// unscale: multiply all gradients by inv_scale in place, and measure them in the same pass.
//
// Compiled once for each norm, as norm_check is; one launch. If inv_scale is exactly 1, nothing is written.
// Bytes: B read, B written (0 if inv_scale is 1).
#include "measure.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    unscale(Table table, double p, DeviceScalar inv_scale, Results results) {
  measure_all<NORM, true>(table, NORM::of(p), inv_scale, results);
}
