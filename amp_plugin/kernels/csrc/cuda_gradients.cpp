#include "cuda_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <string>

#include "one_value.h"

namespace amp_plugin::cuda {
namespace {

// The word for a norm in the names of kernels.
const char* word_of(double p) {
  if (p == 2.0) return " Squares";
  return p == std::numeric_limits<double>::infinity() ? " Maximum" : " Power";
}

}  // namespace

GradientTable GradientTable::of(at::TensorList gradients, c10::Device on) {
  Device& device = *Device::find(on.index());
  const Handle stream = device.stream();
  return {device, stream, device.table(gradients, stream)};
}

std::optional<GradientTable> GradientTable::kept(at::TensorList gradients, const at::Tensor& scale) {
  Device* device = scale.is_cuda() ? Device::find(scale.device().index()) : nullptr;
  if (device == nullptr) return std::nullopt;
  const Handle stream = device->stream();
  SharedTable kept = device->kept_table(gradients, stream);
  return kept ? std::optional<GradientTable>({*device, stream, std::move(kept)}) : std::nullopt;
}

Measured GradientTable::measure(bool writes, const at::Tensor& inv_scale, double p, bool is_scale) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::Device on = device.device();
  const DeviceScalar factor = scalar(inv_scale, "inv_scale", on, is_scale);
  const at::Tensor norm = new_number(on), found_inf = new_number(on);
  const at::Tensor flags = at::empty({table->table.count}, at::device(on).dtype(at::kByte));
  const Results results{
      norm.mutable_data_ptr<float>(), found_inf.mutable_data_ptr<float>(), flags.mutable_data_ptr<uint8_t>()};
  const std::string kernel = (writes ? "unscale" : "norm_check") + std::string(word_of(p));
  device.launch_on(table->table, stream, kernel, p, factor, results);
  return {norm, found_inf, flags};
}

at::Tensor GradientTable::multiply_(
    const at::Tensor& factor, std::optional<double> max_norm, const OptionalTensor& skipped) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::Device on = device.device();
  const DeviceScalar value = scalar(factor, "factor", on);
  if (skipped) require_one_element(*skipped, "found_inf", on, at::kFloat);
  const void* flag = skipped ? skipped->const_data_ptr() : nullptr;
  at::Tensor found_inf = new_number(on);
  device.launch_on(
      table->table, stream, "multiply", value, static_cast<float>(max_norm.value_or(-1.0)), flag,
      found_inf.mutable_data_ptr<float>());
  return found_inf;
}

}  // namespace amp_plugin::cuda
