// judge_step: decide whether a step is a spike, which means that its value is far above those of earlier
// steps. This one thread replaces about thirty launches of torch's ops.
#include "elements.cuh"

using namespace amp_plugin::cuda;

extern "C" __global__ void judge_step(
    StepValues values, const float* norm, const float* found_inf, StepStatistics* statistics, SpikeRule rule,
    float* judged) {
  judge_values(values, norm, found_inf, statistics, rule, judged);
}
