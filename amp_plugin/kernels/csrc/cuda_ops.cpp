// The ops for CUDA tensors. Each is one launch, never waits for the device, and runs no Python code.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "cuda_gradients.h"
#include "op_calls.h"
#include "tensor_memory.h"

namespace amp_plugin::cuda {
namespace {

// The index of the device: that of the scale if it is on a GPU, else that of the first tensor on a GPU.
c10::DeviceIndex index_of(const at::Tensor& scale, at::TensorList tensors) {
  if (scale.is_cuda()) return scale.device().index();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cuda()) return tensor.device().index();
  }
  return 0;
}

// A list of tensors in which each tensor with gaps in memory is replaced by a dense copy.
class Dense {
 public:
  explicit Dense(at::TensorList tensors) : tensors_(tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].is_non_overlapping_and_dense()) continue;
      if (copies_.empty()) copies_ = tensors.vec();
      copies_[i] = tensors[i].contiguous();
    }
  }

  at::TensorList tensors() const { return copies_.empty() ? tensors_ : at::TensorList(copies_); }

  void write_back() const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (!copies_[i].is_same(tensors_[i])) tensors_[i].copy_(copies_[i]);
    }
  }

 private:
  at::TensorList tensors_;
  std::vector<at::Tensor> copies_;
};

Measured norm_check(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  Device* device = Device::find(index_of(inv_scale, grads));
  if (device == nullptr) {
    return call_op<norm_check>("amp_plugin::_plain_norm_check", grads, inv_scale, p, is_scale);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const Dense dense(grads);
  return GradientTable(*device, dense.tensors()).measure(false, inv_scale, p, is_scale);
}

Measured unscale_(at::TensorList grads, const at::Tensor& inv_scale, double p, bool is_scale) {
  Device* device = Device::find(index_of(inv_scale, grads));
  if (device == nullptr) {
    return call_op<unscale_>("amp_plugin::_plain_unscale_", grads, inv_scale, p, is_scale);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const Dense dense(grads);
  const Measured result = GradientTable(*device, dense.tensors()).measure(true, inv_scale, p, is_scale);
  dense.write_back();
  increment_versions(grads);
  return result;
}

at::Tensor multiply_(
    at::TensorList grads, const at::Tensor& factor, std::optional<double> max_norm,
    const OptionalTensor& skipped) {
  Device* device = Device::find(index_of(factor, grads));
  if (device == nullptr) {
    return call_op<multiply_>("amp_plugin::_plain_multiply_", grads, factor, max_norm, skipped);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const Dense dense(grads);
  at::Tensor found_inf = GradientTable(*device, dense.tensors()).multiply_(factor, max_norm, skipped);
  dense.write_back();
  increment_versions(grads);
  return found_inf;
}

void update_scale_(
    const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
    const at::Tensor& found_inf, double growth_factor, double backoff_factor, int64_t growth_interval,
    double min_scale, double max_scale, int64_t hysteresis, int64_t mode) {
  Device* device = Device::find(scale.device().index());
  if (device == nullptr) {
    return call_op<update_scale_>(
        "amp_plugin::_plain_update_scale_", scale, growth_tracker, hysteresis_tracker, found_inf,
        growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis, mode);
  }
  for (const at::Tensor* tensor : {&scale, &found_inf})
    require_one_element(*tensor, "update_scale_", device->device(), at::kFloat);
  for (const at::Tensor* tensor : {&growth_tracker, &hysteresis_tracker})
    require_one_element(*tensor, "update_scale_", device->device(), at::kInt);
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max();
  constexpr double kLargest = std::numeric_limits<float>::max();
  device->launch(
      kUpdateScale, 1, device->stream(), scale.mutable_data_ptr(), growth_tracker.mutable_data_ptr(),
      hysteresis_tracker.mutable_data_ptr(), found_inf.const_data_ptr(), growth_factor, backoff_factor,
      static_cast<int32_t>(std::min(growth_interval, kLongest)), static_cast<float>(min_scale),
      static_cast<float>(std::min(max_scale, kLargest)), static_cast<int32_t>(hysteresis),
      static_cast<int32_t>(mode));
  increment_versions({scale, growth_tracker, hysteresis_tracker});
}

at::Tensor clip_factor(
    const at::Tensor& norm, double max_norm, const std::optional<at::Tensor>& scale,
    const std::optional<at::Tensor>& found_inf) {
  Device* device = Device::find(norm.device().index());
  if (device == nullptr) {
    return call_op<clip_factor>("amp_plugin::_plain_clip_factor", norm, max_norm, scale, found_inf);
  }
  require_one_element(norm, "norm", device->device(), at::kFloat);
  if (scale) require_one_element(*scale, "scale", device->device(), at::kFloat);
  if (found_inf) require_one_element(*found_inf, "found_inf", device->device(), at::kFloat);
  at::Tensor factor = at::empty({}, at::device(device->device()).dtype(at::kFloat));
  const void* carried = scale ? scale->const_data_ptr() : nullptr;
  const void* found = found_inf ? found_inf->const_data_ptr() : nullptr;
  device->launch(
      kClipFactor, 1, device->stream(), norm.const_data_ptr(), static_cast<float>(max_norm), carried, found,
      factor.mutable_data_ptr());
  return factor;
}

at::Tensor judge_step_(
    at::TensorList values, const at::Tensor& norm, const at::Tensor& found_inf, const at::Tensor& statistics,
    at::TensorList growth_trackers, double sigma, int64_t window, int64_t warmup, double least_deviation,
    int64_t action) {
  const bool is_too_much = std::max(values.size(), growth_trackers.size()) > kMostPacked;
  Device* device = is_too_much ? nullptr : Device::find(norm.device().index());
  if (device == nullptr) {
    return call_op<judge_step_>(
        "amp_plugin::_plain_judge_step_", values, norm, found_inf, statistics, growth_trackers, sigma, window,
        warmup, least_deviation, action);
  }
  StepValues given{};
  given.count = static_cast<uint32_t>(values.size());
  given.tracker_count = static_cast<uint32_t>(growth_trackers.size());
  for (size_t i = 0; i < values.size(); ++i) given.values[i] = scalar(values[i], "a value", device->device());
  for (size_t i = 0; i < growth_trackers.size(); ++i) {
    require_one_element(growth_trackers[i], "a growth tracker", device->device(), at::kInt);
    given.trackers[i] = growth_trackers[i].mutable_data_ptr<int32_t>();
  }
  require_one_element(norm, "norm", device->device(), at::kFloat);
  require_one_element(found_inf, "found_inf", device->device(), at::kFloat);
  TORCH_CHECK_VALUE(
      statistics.scalar_type() == at::kFloat && statistics.numel() == 4 && statistics.is_contiguous() &&
          statistics.device() == device->device(),
      "judge_step_: statistics are ", statistics.scalar_type(), " of shape ", statistics.sizes(), " on ",
      statistics.device(), "; give mean, variance, steps and held as float32 [4] on ", device->device());
  at::Tensor judged = at::empty({kRulingNumbers}, at::device(device->device()).dtype(at::kFloat));
  device->launch(
      kJudgeStep, 1, device->stream(), given, norm.const_data_ptr<float>(), found_inf.const_data_ptr<float>(),
      statistics.mutable_data_ptr<float>(), static_cast<float>(sigma), static_cast<int32_t>(window),
      static_cast<int32_t>(warmup), static_cast<float>(least_deviation), static_cast<int32_t>(action),
      judged.mutable_data_ptr<float>());
  increment_versions({statistics});
  increment_versions(growth_trackers);
  return judged;
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_plugin, CUDA, m) {
  m.impl("norm_check", norm_check);
  m.impl("unscale_", unscale_);
  m.impl("multiply_", multiply_);
  m.impl("update_scale_", update_scale_);
  m.impl("clip_factor", clip_factor);
  m.impl("judge_step_", judge_step_);
}

}  // namespace amp_plugin::cuda
