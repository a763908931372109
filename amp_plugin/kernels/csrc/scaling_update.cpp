// update_scale_ and clip_factor on the CPU: a few scalars; the rules are told in kernels/reference.py.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "cpu_ops.h"
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
      const auto grown = static_cast<float>(value * growth_factor);  // in double, as torch
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

}  // namespace amp_plugin
