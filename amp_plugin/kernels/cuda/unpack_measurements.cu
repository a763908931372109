// unpack_measurements: compute norm and found_inf from the sums over all ranks. One thread replaces four
// launches.
#include "packed_measurements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void unpack_measurements(Packed packed, double p, float* norm, float* found_inf) {
  double total = neutral(p), found = 0;
  for (u32 i = 0; i < packed.count; ++i) {
    const u32 count = packed.power_counts[i];
    for (u32 k = 0; k < count; ++k) total = join_powers(total, packed.values[i][k], p);
    found = packed.values[i][count];
  }
  *norm = float(raised(total, 1 / p, p));
  *found_inf = found > 0 ? 1.0f : 0.0f;
}
