// pack_measurements: write the measurements that ranks will add up. One thread replaces about four launches.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void pack_measurements(Measurements measured, double* packed, double p) {
  pack_powers(measured, packed, p);
}
