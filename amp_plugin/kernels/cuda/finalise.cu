// finalise: join the partial results of all blocks into norm, found_inf and flags. One block.
//
// Compiled once for each norm, as norm_check.
// norm = inv_scale * root(total) in fp64, rounded once. The order is fixed, so the result is the same
// in every run. Bytes: 16 per block of the first pass read.
#include "measure.cuh"

using namespace amp_plugin;

constexpr u32 kFinalThreads = 1024;

extern "C" __global__ void __launch_bounds__(kFinalThreads) finalise(
    const Partial* partials, u32 blocks, u32 tensors, double p, DeviceScalar inv_scale, float* norm_out,
    float* found_inf, u8* flags) {
  const NORM norm = NORM::of(p);
  for (u32 i = threadIdx.x; i < tensors; i += kFinalThreads) flags[i] = 0;
  Measured mine{NORM::identity(), 0};
  for (u32 i = threadIdx.x; i < blocks; i += kFinalThreads) {
    mine.total = norm.join(mine.total, partials[i].total);
    mine.bits |= partials[i].bits;
  }
  const u32 seen = mine.bits | (mine.bits >> kWritten);
  // Rare, and without atomics: all writers of a phase write the same byte.
  for (u32 bit = kHasInf; bit <= kHasNan; bit <<= 1) {
    __syncthreads();
    if (!(seen & bit)) continue;
    for (u32 i = threadIdx.x; i < blocks; i += kFinalThreads) {
      const u32 bits = partials[i].bits | (partials[i].bits >> kWritten);
      if (bits & bit) flags[partials[i].tensor] = u8(flags[partials[i].tensor] | bit);
    }
  }
  const Measured all = reduce_block<kFinalThreads>(norm, mine);
  if (threadIdx.x > 0) return;
  double value = blocks > 0 ? norm.root(all.total) : 0;
  if (!norm.counts()) {
    value *= fabs(inv_scale.read());
    if (all.bits & kHasNan) value = __longlong_as_double(0x7ff8000000000000ll);
  }
  *norm_out = float(value);
  *found_inf = all.bits ? 1.0f : 0.0f;
}
