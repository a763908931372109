// norm_check: read all gradients once; compute their norm, and find those that are not finite.
//
// Compiled once for each norm, for example with -DNORM=Squares. One launch: the last block to finish joins
// the results of all blocks. Bytes: B read.
#include "measure.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    norm_check(Table table, double p, DeviceScalar inv_scale, Results results) {
  measure_all<NORM, false>(table, NORM::of(p), inv_scale, results);
}
