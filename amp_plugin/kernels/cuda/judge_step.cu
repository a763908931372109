// judge_step: decide whether a step is a spike. One thread replaces about thirty launches.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void judge_step(
    StepValues values, const float* norm, const float* found_inf, StepStatistics* statistics, SpikeRule rule,
    float* judged) {
  judge_values(values, norm, found_inf, statistics, rule, judged);
}
