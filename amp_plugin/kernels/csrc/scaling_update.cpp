// update_scale_, clip_factor and judge_step_ on the CPU. They process a few scalars. kernels/reference.py
// describes their rules.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "cpu_ops.h"
#include "cuda_layout.h"
#include "one_value.h"
#include "tensor_memory.h"

namespace amp_plugin {
namespace {

enum HysteresisMode : int64_t { kApex = 0, kMegatron = 1, kDeepSpeed = 2 };

}  // namespace

void update_scale_(
    const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
    const at::Tensor& found_inf, double growth_factor, double backoff_factor, int64_t growth_interval,
    double min_scale, double max_scale, int64_t hysteresis, int64_t mode) {
  auto& value = *scale.mutable_data_ptr<float>();
  auto& steps = *growth_tracker.mutable_data_ptr<int32_t>();
  auto& tolerance = *hysteresis_tracker.mutable_data_ptr<int32_t>();
  if (*found_inf.const_data_ptr<float>() > 0.0F) {
    steps = 0;
    const bool spent = tolerance <= 1;
    if (!spent || mode != kDeepSpeed) {
      --tolerance;
    }
    if (spent) {
      const auto floor = std::min(value, static_cast<float>(min_scale));
      value = std::max(static_cast<float>(value * backoff_factor), floor);
    }
  } else {
    ++steps;
    const bool grows = steps >= std::min<int64_t>(growth_interval, std::numeric_limits<int32_t>::max());
    if (grows) {
      const auto grown = static_cast<float>(value * growth_factor);  // computed in double, as torch does
      const auto ceiling =
          std::max(value, static_cast<float>(std::min<double>(max_scale, std::numeric_limits<float>::max())));
      value = std::isfinite(grown) ? std::min(grown, ceiling) : value;
      steps = 0;
    }
    if (grows || mode == kApex) {
      tolerance = static_cast<int32_t>(hysteresis);
    }
  }
  increment_versions({scale, growth_tracker, hysteresis_tracker});
}

float clip_factor_of(float norm, double max_norm, const OptionalTensor& found_inf) {
  const bool skipped = found_inf ? *found_inf->const_data_ptr<float>() > 0 : !std::isfinite(norm);
  return skipped ? 1.0F : std::min(1.0F, static_cast<float>(max_norm) / (norm + 1e-6F));
}

at::Tensor clip_factor(
    const at::Tensor& norm, double max_norm, const std::optional<at::Tensor>& scale,
    const std::optional<at::Tensor>& found_inf) {
  const float factor = clip_factor_of(*norm.const_data_ptr<float>(), max_norm, found_inf);
  return tensor_of(scale ? *scale->const_data_ptr<float>() / factor : factor);
}

at::Tensor judge_step_(
    at::TensorList values, const at::Tensor& norm, const at::Tensor& found_inf, const at::Tensor& statistics,
    at::TensorList growth_trackers, double sigma, int64_t window, int64_t warmup, double least_deviation,
    int64_t action) {
  TORCH_CHECK_VALUE(
      statistics.scalar_type() == at::kFloat && statistics.numel() == 4 && statistics.is_contiguous(),
      "judge_step_: statistics are ", statistics.scalar_type(), " of shape ", statistics.sizes(),
      "; give mean, variance, steps and held as float32 [4]");
  float value = 0.0F;
  for (const at::Tensor& given : values) value += static_cast<float>(one_value(given, "a value"));
  auto* kept = statistics.mutable_data_ptr<float>();
  cuda::StepStatistics now{kept[0], kept[1], kept[2], kept[3]};
  const cuda::StepRuling ruling = cuda::judge(
      now, value, static_cast<float>(one_value(norm, "norm")), one_value(found_inf, "found_inf") > 0,
      {static_cast<float>(sigma), static_cast<float>(least_deviation), static_cast<float>(window),
       static_cast<float>(warmup), static_cast<int>(action)});
  kept[0] = now.mean;
  kept[1] = now.variance;
  kept[2] = now.steps;
  kept[3] = now.held;
  for (const at::Tensor& tracker : growth_trackers)
    *tracker.mutable_data_ptr<int32_t>() -= ruling.is_left_out;
  increment_versions({statistics});
  increment_versions(growth_trackers);
  at::Tensor judged = at::empty({cuda::kRulingNumbers}, at::kFloat);
  ruling.write(judged.mutable_data_ptr<float>());
  return judged;
}

}  // namespace amp_plugin
