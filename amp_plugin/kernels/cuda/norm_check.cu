// norm_check: one read of all gradients gives their norm and which of them are not finite.
//
// Compiled once for each norm, with -DNORM=Squares and so on. One block a chunk; finalise.cu joins the
// partial results. Bytes: B read, 16 per block written.
#include "measure.cuh"

using namespace amp_plugin;

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    norm_check(const Row* rows, u32 count, u32 chunk_bytes, double p, Partial* partials) {
  measure_block<NORM, false>(rows, count, chunk_bytes, NORM::of(p), 1, partials);
}
