// judge_step: decide whether a step is a spike. One thread replaces about thirty launches. The rule is in
// kernels/reference.py.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void judge_step(
    StepValues values, const float* norm, const float* found_inf, float* statistics, float sigma, int window,
    int warmup, float least_deviation, int action, float* judged) {
  float value = 0;
  for (u32 i = 0; i < values.count; ++i) {
    const DeviceScalar given = values.values[i];
    value += given.is_double ? float(*static_cast<const double*>(given.address))
                             : *static_cast<const float*>(given.address);
  }
  StepStatistics now{statistics[0], statistics[1], statistics[2], statistics[3]};
  const StepRuling ruling = judge(
      now, value, *norm, *found_inf > 0,
      SpikeRule{sigma, least_deviation, float(window), float(warmup), action});
  statistics[0] = now.mean;
  statistics[1] = now.variance;
  statistics[2] = now.steps;
  statistics[3] = now.held;
  for (u32 i = 0; i < values.tracker_count; ++i) *values.trackers[i] -= ruling.is_left_out;
  ruling.write(judged);
}
