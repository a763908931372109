// norm_check: one read of all gradients gives their norm and which of them are not finite.
//
// Compiled once for each norm, with -DNORM=Squares and so on. One launch: the last block to come joins
// what all have found. Bytes: B read.
#include "measure.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    norm_check(Table table, double p, DeviceScalar inv_scale, Results results) {
  measure_all<NORM, false>(table, NORM::of(p), inv_scale, results);
}
