// pack_measurements: write the measurements that ranks will add up. One thread replaces about four launches.
#include "packed_measurements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void pack_measurements(Measurements measured, double* packed, double p) {
  for (u32 slot = 0; slot < measured.power_count; ++slot) {
    double power = neutral(p);
    for (u32 i = 0; i < measured.norm_count; ++i) {
      if (measured.slots[i] == slot) power = join_powers(power, raised(read(measured.norms[i]), p, p), p);
    }
    packed[slot] = is_infinite(p) ? power : power / measured.replicas[slot];
  }
  double found = 0;
  for (u32 i = 0; i < measured.flag_count; ++i) found = join_max(found, read(measured.flags[i]));
  packed[measured.power_count] = found;
}
